"""Decode steps of a model's real shapes with random weights, against the device's copy bandwidth.

    python bench/step.py --rows 1 8 64

Each step is the engine's own program: forward pass, sampler, device-resident tokens and lengths.
Steps are sent one behind the other and the clock stops when the last is done, so the host's own
time is hidden as it is in the engine. Prints one JSON receipt.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

import receipts

from sparkjax.engine.programs import HEADER, Programs
from sparkjax.engine.records import Sampling, Submit
from sparkjax.engine.state import State, empty_slots, settings
from sparkjax.mesh import spmd
from sparkjax.model import Model, here
from sparkjax.models.cache import Sizes

SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
    },
}


def copy_bandwidth(nbytes: int) -> float:
    """Bytes a second of a device copy (read plus written), the median of 20."""
    source = jnp.ones(nbytes // 4, jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    jax.block_until_ready(copy(source))
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        jax.block_until_ready(copy(source))
        times.append(time.perf_counter() - begin)
    return 2 * nbytes / statistics.median(times)


def measure(model: Model, rows: int, position: int, steps: int, rounds: int) -> list[float]:
    """Seconds a step, one figure a round, decoding `rows` sequences from `position` on."""
    page = 64
    width = -(-(position + steps * (rounds + 1)) // page)
    padded = max(rows, 2)
    programs = Programs(model)
    vocab = model.config.vocab
    place = spmd.shardings(model.mesh, jax.sharding.PartitionSpec())
    slots, mask = jax.jit(
        lambda: (
            empty_slots(padded, vocab),
            jnp.full((padded, -(-vocab // 32)), 0xFFFFFFFF, jnp.uint32),
        ),
        out_shardings=place,
    )()
    state = State(model.new_caches(Sizes(padded * width, page, padded)), slots)
    for slot in range(padded):
        request = Submit(slot + 1, (1,), 1, Sampling())
        state = programs.seat(state, np.int32(slot), settings(request))
    lengths = jax.device_put(jnp.full(padded, position, jnp.int32), place)
    state = dataclasses.replace(state, slots=dataclasses.replace(state.slots, lengths=lengths))
    numbers = np.zeros((padded, HEADER + width), np.int32)
    for row in range(rows):
        numbers[row, :HEADER] = row, 0, 1, 1, 0
        numbers[row, HEADER:] = np.arange(row * width, (row + 1) * width)
    found = []
    for round in range(rounds + 1):  # the first compiles and warms up
        begin = time.perf_counter()
        for _ in range(steps):
            state, packed = programs.decode(model.params, state, numbers, mask, None)
        jax.block_until_ready(packed)
        if round:
            found.append((time.perf_counter() - begin) / steps)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--position", type=int, default=256)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()

    context = here(args.dtype)
    model = Model.random(SHAPES[args.model], context)
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    on_cpu = context.platform == "cpu"
    bandwidth = copy_bandwidth(1 << 26 if on_cpu else 1 << 31)
    results = []
    for rows in args.rows:
        times = measure(model, rows, args.position, args.steps, args.rounds)
        step = statistics.median(times)
        results.append(
            {
                "rows": rows,
                "step_ms": round(step * 1e3, 4),
                "min_ms": round(min(times) * 1e3, 4),
                "max_ms": round(max(times) * 1e3, 4),
                "tokens_per_second": round(rows / step, 1),
                "weight_gb_per_second": round(weights / step / 1e9, 1),
                "times_weights_over_bandwidth": round(step / (weights / bandwidth), 2),
            }
        )
    receipts.show(
        {
            "what": f"decode steps of {args.model}, random {context.dtype} weights",
            "device": jax.devices()[0].device_kind,
            "weight_bytes": weights,
            "position": args.position,
            "copy_gb_per_second": round(bandwidth / 1e9, 1),
            "steps": results,
        }
    )


if __name__ == "__main__":
    main()
