"""Decode steps at a model's real shapes with random weights, against the bytes that they read.

    python bench/step.py --model smollm2-135m --rows 1 8 64
    python bench/step.py --model glm-5.3-flash-hybrid --layers 8 --rows 1 8

A model is one of MODELS below or a manifest of checkpoints/, cut to its first `--layers` layers
(every kind of layer is among the first eight of the published models), with packed weights as
published and random codes. Each step is the engine's own two programs; steps are sent one behind
the other and the clock stops when the last is done, so the host's own time is hidden as it is in
the engine. The device's constants are measured in the same process, behind the steps, so that the
peak of bytes in use is theirs; the step time and the bytes that `sparkjax plan` expects stand beside
the measured ones. With `--trace` the time of a step is itemised by kernel. Prints one JSON receipt.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
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
    # The width of Llama 3.3 70B, which has 80 layers of it.
    "llama3-70b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 28672,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "max_position_embeddings": 131072,
    },
    # The width of Llama 3.1 405B, which has 126 layers of it: 6.4 GB each.
    "llama3-405b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 16384,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 53248,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "max_position_embeddings": 131072,
    },
}


def manifest_of(name: str, layers: int | None) -> Manifest:
    """A manifest, or the bf16 one of MODELS or of a folder's config.json, cut to so many layers."""
    config = MODELS.get(name)
    if config is None and (file := Path(name) / "config.json").is_file():
        config = json.loads(file.read_text())
    if config is not None:
        base = recipe.manifest_named("qwen3-0.6b")
        found = dataclasses.replace(base, name=name, product=name, config=config, stored=())
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


def prelude(model: Model, rows: int, width: int = 1) -> Any:
    """Zeros in place of what the host looks up."""
    shapes = getattr(model.family, "prelude_shapes", None)
    found = shapes(model.config) if shapes else {}
    return {n: jnp.zeros((rows, width, *s), jnp.float32) for n, s in found.items()} or None


@dataclasses.dataclass
class Steps:
    """The state of `rows` sequences that decode from a position on."""

    model: Model
    rows: int
    position: int
    limits: Limits
    compiled: Programs | None = None  # of the same limits, where there are some

    def __post_init__(self) -> None:
        limits, vocab = self.limits, self.model.config.vocab
        width = -(-limits.context // limits.page_size)
        place = spmd.shardings(self.model.mesh, jax.sharding.PartitionSpec())
        words = -(-vocab // 32)
        slots, lengths, self.mask, self.mask_of_one = jax.jit(
            lambda: (
                empty_slots(limits.slots, vocab),
                jnp.full(limits.slots, self.position, jnp.int32),
                jnp.full((limits.slots, words), 0xFFFFFFFF, jnp.uint32),
                jnp.full((1, words), 0xFFFFFFFF, jnp.uint32),
            ),
            out_shardings=place,
        )()
        self.programs = self.compiled or Programs(self.model)
        sizes = Sizes(limits.pages, limits.page_size, limits.slots)
        self.state = State(self.model.new_caches(sizes), slots)
        for slot in range(limits.slots):
            request = Submit(slot + 1, (1,), 1, Sampling())
            self.state = self.programs.seat(self.state, np.int32(slot), settings(request))
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

    def _tile(self) -> tuple[Any, ...]:
        """The arguments of the largest prefill tile of the first sequence, at its position."""
        size, numbers = self.limits.tiles[-1], self.numbers[:1].copy()
        numbers[0, :HEADER] = 0, self.position, size, 0, 0
        tokens = np.arange(size, dtype=np.int32)[None] % self.model.config.vocab
        ahead = prelude(self.model, 1, size)
        return self.model.params, self.state, numbers, tokens, tokens, self.mask_of_one, ahead

    def prefill(self, tiles: int) -> float:
        """Seconds a tile of `tiles` tiles of one prompt, all at the same position."""
        begin = time.perf_counter()
        for _ in range(tiles):
            self.state, packed, _ = self.programs.tile(*self._tile())
        jax.block_until_ready(packed)
        return (time.perf_counter() - begin) / tiles

    def counts_of_tile(self) -> hlo.Counts:
        """What one tile launches, as compiled for this device."""
        return hlo.count(self.programs.tile.lower(*self._tile()).compile().as_text(), min)

    def counts(self) -> hlo.Counts:
        """What one step launches, as compiled for this device."""
        return self.compile()[0]

    def compile(self) -> tuple[hlo.Counts, int]:
        """What one step launches as compiled for this device, and the bytes that a plan expects
        to be in use: arguments by the declarations, temporaries of the larger program."""
        advance = self.programs.advance.lower(
            self.model.params, self.state, self.numbers, self.prelude
        ).compile()
        _, residual = jax.eval_shape(
            self.programs.advance, self.model.params, self.state, self.numbers, self.prelude
        )
        choose = self.programs.choose.lower(
            self.model.params, self.state.slots, self.numbers, residual, self.mask
        ).compile()
        counts = hlo.count(advance.as_text(), min) + hlo.count(choose.as_text(), min)
        temporaries = max(p.memory_analysis().temp_size_in_bytes for p in (advance, choose))
        family, config, limits = self.model.family, self.model.config, self.limits
        sizes = Sizes(limits.pages, limits.page_size, limits.slots)
        items = [
            *memory.weight_items(family.declare(config, 1), self.model.params, 1),
            *memory.slot_items(limits.slots, config.vocab),
            *memory.cache_items(
                family.declare_caches(config, 1), sizes, 1, self.model.context.dtype
            ),
        ]
        return counts, temporaries + sum(item.nbytes for item in items)


def itemised(folder: str, steps: int) -> dict[str, Any]:
    """A profile's kernels by name without their numbers: launches and microseconds a step."""
    found: dict[str, list[float]] = {}
    first, last = float("inf"), 0.0
    for file in Path(folder).rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
            if not plane.name.startswith("/device:GPU"):
                continue
            for row in plane.lines:
                if not row.name.startswith("Stream"):
                    continue
                for event in row.events:
                    name = re.sub(r"[_.]?\d+", "", event.name)
                    item = found.setdefault(name, [0, 0.0])
                    item[0] += 1
                    item[1] += event.duration_ns
                    first = min(first, event.start_ns)
                    last = max(last, event.start_ns + event.duration_ns)
    busy = sum(item[1] for item in found.values())
    largest = sorted(found.items(), key=lambda item: -item[1][1])
    return {
        "busy_us": round(busy / steps / 1e3, 1),
        "span_us": round((last - first) / steps / 1e3, 1) if found else None,
        "launches": sum(item[0] for item in found.values()) / steps,
        "kernels": {
            name: [count / steps, round(ns / steps / 1e3, 1)] for name, (count, ns) in largest[:40]
        },
    }


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

    manifest = manifest_of(args.model, args.layers)
    model = random_model(manifest, args.dtype)
    found = [measured(model, rows, args) for rows in args.rows]
    here_now: Device = measure.measure(device("gb10"))
    gb10 = device("gb10")
    tree = model.family.declare(model.config, 1)
    planes = model.family.declare_caches(model.config, 1)
    work = cost.work(tree, model.params, planes, manifest.config, 1, model.context.dtype)
    results = []
    for rows, (counts, times, row) in zip(args.rows, found, strict=True):
        step, read = statistics.median(times), work.bytes_at(rows, args.position)
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
                "gb10_projected_ms": round(there.total * 1e3, 3),
                **row,
            }
        )
    receipts.show(
        {
            "what": f"decode steps of {args.model}, random weights as published",
            "layers": model.config.layers,
            "device": dataclasses.asdict(here_now),
            "weight_bytes": memory.nbytes(model.params),
            "position": args.position,
            "steps": results,
        }
    )


def measured(
    model: Model, rows: int, args: argparse.Namespace
) -> tuple[hlo.Counts, list[float], dict[str, Any]]:
    """Launches of a step of so many rows, seconds of it round by round, and what is in use."""
    tokens = args.position + args.steps * (args.rounds + 2) + 1
    steps = Steps(model, rows, args.position, limits_for(model, rows, tokens))
    steps.run(args.steps)  # compiles and warms up
    times = [steps.run(args.steps) for _ in range(args.rounds)]
    print(f"{rows} rows: {statistics.median(times) * 1e3:.3f} ms", file=sys.stderr, flush=True)
    stats = jax.devices()[0].memory_stats() or {}
    counts, planned = steps.compile()
    row: dict[str, Any] = {
        "peak_bytes_in_use": stats.get("peak_bytes_in_use"),
        "planned_bytes": planned,
        "cache_bytes": memory.nbytes(steps.state.caches),
    }
    if args.trace:
        folder = f"{args.trace}/{rows}"
        with jax.profiler.trace(folder):
            steps.run(4)
        row["trace"] = itemised(folder, 4)
    return counts, times, row


if __name__ == "__main__":
    main()
