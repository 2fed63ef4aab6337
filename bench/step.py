"""Decode steps at a model's real shapes with random weights, against the bytes that they read.

    python bench/step.py --model smollm2-135m --rows 1 8 64
    python bench/step.py --model glm-5.3-flash-hybrid --layers 8 --rows 1 8

A model is one of MODELS below or a manifest of checkpoints/, cut to its first `--layers` layers
(every kind of layer is among the first eight of the published models), with packed weights as
published and random codes. Each step is the engine's own two programs; steps are sent one behind
the other and the clock stops when the last is done, so the host's own time is hidden as it is in
the engine. The device's constants are measured in the same process, and the step that `sparkjax
plan` expects of them stands beside the measured one. Prints one JSON receipt.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

# The peak of bytes in use must be the programs' own. JAX reads this when it is imported.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

import random_weights
import receipts

from sparkjax.engine import memory
from sparkjax.engine.programs import HEADER, Programs
from sparkjax.engine.records import Limits, Sampling, Submit
from sparkjax.engine.state import State, empty_slots, settings
from sparkjax.manifests import Manifest
from sparkjax.mesh import spmd
from sparkjax.model import Model, here
from sparkjax.models.cache import Sizes
from sparkjax.plan import cost, hlo, measure, recipe
from sparkjax.plan.devices import Device, device
from sparkjax.plan.weights import abstract_weights

MODELS: dict[str, dict[str, Any]] = {
    "smollm2-135m": recipe.manifest_named("smollm2-135m-instruct").config,
    "qwen3-8b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "max_position_embeddings": 40960,
    },
}


def manifest_of(name: str, layers: int | None) -> Manifest:
    """A manifest, or the bf16 one of MODELS, cut to so many layers."""
    if name in MODELS:
        base = recipe.manifest_named("qwen3-0.6b")
        found = dataclasses.replace(base, name=name, product=name, config=MODELS[name], stored=())
    else:
        found = recipe.manifest_named(name)
    if layers is None:
        return found
    return dataclasses.replace(found, config=random_weights.shortened(found.config, layers))


def random_model(manifest: Manifest, dtype: str | None) -> Model:
    """The model with random weights as the manifest stores them."""
    context = here(dtype)
    family = manifest.family
    config = family.read_config(manifest.config)
    shapes = abstract_weights(manifest, family.declare(config, 1), 1, context.dtype)
    return Model(family, config, random_weights.fill(shapes), context)


def prelude(model: Model, rows: int) -> Any:
    """Zeros in place of what the host looks up."""
    shapes = getattr(model.family, "prelude_shapes", None)
    found = shapes(model.config) if shapes else {}
    return {n: jnp.zeros((rows, 1, *s), jnp.float32) for n, s in found.items()} or None


@dataclasses.dataclass
class Steps:
    """The state of `rows` sequences that decode from a position on."""

    model: Model
    rows: int
    position: int
    limits: Limits

    def __post_init__(self) -> None:
        limits, vocab = self.limits, self.model.config.vocab
        width = -(-limits.context // limits.page_size)
        place = spmd.shardings(self.model.mesh, jax.sharding.PartitionSpec())
        slots, self.mask = jax.jit(
            lambda: (
                empty_slots(limits.slots, vocab),
                jnp.full((limits.slots, -(-vocab // 32)), 0xFFFFFFFF, jnp.uint32),
            ),
            out_shardings=place,
        )()
        self.programs = Programs(self.model)
        sizes = Sizes(limits.pages, limits.page_size, limits.slots)
        self.state = State(self.model.new_caches(sizes), slots)
        for slot in range(limits.slots):
            request = Submit(slot + 1, (1,), 1, Sampling())
            self.state = self.programs.seat(self.state, np.int32(slot), settings(request))
        lengths = jax.device_put(jnp.full(limits.slots, self.position, jnp.int32), place)
        slots = dataclasses.replace(self.state.slots, lengths=lengths)
        self.state = dataclasses.replace(self.state, slots=slots)
        self.numbers = np.zeros((limits.slots, HEADER + width), np.int32)
        for row in range(self.rows):
            self.numbers[row, :HEADER] = row, 0, 1, 1, 0
            self.numbers[row, HEADER:] = np.arange(row * width, (row + 1) * width)
        self.prelude = prelude(self.model, limits.slots)

    def run(self, steps: int) -> float:
        """Seconds a step of `steps` steps."""
        begin = time.perf_counter()
        for _ in range(steps):
            self.state, packed = self.programs.decode(
                self.model.params, self.state, self.numbers, self.mask, self.prelude
            )
        jax.block_until_ready(packed)
        return (time.perf_counter() - begin) / steps

    def counts(self) -> hlo.Counts:
        """What one step launches, as compiled for this device."""
        advance = self.programs.advance.lower(
            self.model.params, self.state, self.numbers, self.prelude
        ).compile()
        _, residual = jax.eval_shape(
            self.programs.advance, self.model.params, self.state, self.numbers, self.prelude
        )
        choose = self.programs.choose.lower(
            self.model.params, self.state.slots, self.numbers, residual, self.mask
        ).compile()
        return hlo.count(advance.as_text(), min) + hlo.count(choose.as_text(), min)


def limits_for(model: Model, rows: int, tokens: int) -> Limits:
    slots, page = max(rows, 2), model.page
    width = -(-tokens // page)
    return Limits(
        slots=slots, pages=slots * width, page_size=page, context=width * page, queue=1,
        tiles=(64,), rows=(slots,), busy_tiles=1, idle_tiles=1, admission="reserve", window=1,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m", help="of MODELS, or a manifest")
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--position", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trace", default=None, help="directory of a profile of a few steps")
    args = parser.parse_args()

    here_now: Device = measure.measure(device("gb10"))
    manifest = manifest_of(args.model, args.layers)
    model = random_model(manifest, args.dtype)
    tree = model.family.declare(model.config, 1)
    planes = model.family.declare_caches(model.config, 1)
    work = cost.work(tree, model.params, planes, manifest.config, 1, model.context.dtype)
    gb10 = device("gb10")
    weights, results = memory.nbytes(model.params), []
    for rows in args.rows:
        tokens = args.position + args.steps * (args.rounds + 2) + 1
        steps = Steps(model, rows, args.position, limits_for(model, rows, tokens))
        steps.run(args.steps)  # compiles and warms up
        times = [steps.run(args.steps) for _ in range(args.rounds)]
        if args.trace and rows == args.rows[0]:
            with jax.profiler.trace(args.trace):
                steps.run(4)
        stats = jax.devices()[0].memory_stats() or {}
        counts, step = steps.counts(), statistics.median(times)
        read = work.bytes_at(rows, args.position)
        expected = cost.decode_time(work, counts, here_now, 1, rows, args.position)
        there = cost.decode_time(work, counts, gb10, 1, rows, args.position)
        results.append(
            {
                "rows": rows,
                "step_ms": round(step * 1e3, 4),
                "min_ms": round(min(times) * 1e3, 4),
                "max_ms": round(max(times) * 1e3, 4),
                "read_bytes": int(read),
                "read_gb_per_second": round(read / step / 1e9, 1),
                "times_bytes_over_bandwidth": round(step / (read / here_now.read_gb_s / 1e9), 2),
                "launches": counts.total,
                "launches_by_kind": dict(counts.launches.most_common(12)),
                "host_calls": counts.host_calls,
                "planned_ms": round(expected.total * 1e3, 4),
                "planned_parts_ms": {
                    k: round(v * 1e3, 4) for k, v in dataclasses.asdict(expected).items()
                },
                "planned_over_measured": round(expected.total / step, 3),
                "peak_bytes_in_use": stats.get("peak_bytes_in_use"),
                "cache_bytes": memory.nbytes(steps.state.caches),
                "gb10_projected_ms": round(there.total * 1e3, 3),
            }
        )
        del steps
    receipts.show(
        {
            "what": f"decode steps of {args.model}, random weights as published",
            "layers": model.config.layers,
            "device": dataclasses.asdict(here_now),
            "weight_bytes": weights,
            "position": args.position,
            "steps": results,
        }
    )


if __name__ == "__main__":
    main()
