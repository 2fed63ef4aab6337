"""The native CPU kernels at SmolLM2-135M's shapes, beside a memory copy and numpy's float32 product.

    python bench/native_cpu.py [--repeats 15]

Weights are random blocks of the published types (Q4_1, tied embedding Q8_0), all 30 layers, called
layer after layer inside one jitted scan as a model does. Prints one JSON receipt: the median and
the least wall time of each case in milliseconds, with GB/s of weights (or keys and values) read and
GFLOP/s, both at the median.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

import receipts

from sparkjax.kernels import native
from sparkjax.kernels.attention import native as attention
from sparkjax.kernels.linear import native as linear
from sparkjax.weights.formats.gguf import GGUFTensor

HIDDEN, KV, MLP, VOCAB, LAYERS = 576, 192, 1536, 49152, 30
HEADS, KV_HEADS, DIM, PAGE = 9, 3, 64, 16
SHAPES = {
    "q": (HIDDEN, HIDDEN),
    "k": (KV, HIDDEN),
    "v": (KV, HIDDEN),
    "o": (HIDDEN, HIDDEN),
    "gate": (MLP, HIDDEN),
    "up": (MLP, HIDDEN),
    "down": (HIDDEN, MLP),
}
RANDOM = np.random.default_rng(0)


def blocks(kind: str, *shape: int) -> GGUFTensor:
    """Random codes with scales near 0.008."""
    size = {"Q4_1": 20, "Q8_0": 34}[kind]
    *lead, k = shape
    data = RANDOM.integers(0, 256, (*lead, k // 32, size), np.uint8)
    data[..., 1] = 0x20
    if kind == "Q4_1":
        data[..., 3] = 0xA8
    return GGUFTensor(jnp.asarray(data.reshape(*lead, -1)), kind)


def measure(function: Callable[[], Any], repeats: int, *, nbytes: float, flop: float) -> dict:
    """Median and least wall time of a call that blocks."""
    function()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    median = statistics.median(times)
    return {
        "median_ms": round(median * 1e3, 3),
        "least_ms": round(min(times) * 1e3, 3),
        "gb_s": round(nbytes / median / 1e9, 2),
        "gflop_s": round(flop / median / 1e9, 1),
    }


@jax.jit
def layers(x, weights):
    """All linear maps of all layers; results are used, so that none is dropped."""

    def layer(x, i):
        q, k, v = linear.linear_group(x, [weights[n] for n in ("q", "k", "v")], i)
        y = linear.linear(q, weights["o"], i)
        gate, up = linear.linear_group(y, [weights["gate"], weights["up"]], i)
        y = linear.linear(gate + up, weights["down"], i)
        return 0.9 * x + 1e-6 * (y + k.sum() + v.sum()), None

    return jax.lax.scan(layer, x, jnp.arange(LAYERS))[0]


@jax.jit
def attend(q, k, v, table, start, lengths):
    """Attention of all layers."""

    def layer(q, i):
        y = attention.paged_attention(q, k, v, i, table, start, lengths, scale=DIM**-0.5)
        return q + 1e-3 * y, None

    return jax.lax.scan(layer, q, jnp.arange(LAYERS))[0]


head = jax.jit(linear.linear)


def linear_cases(repeats: int) -> dict[str, Any]:
    weights = {name: blocks("Q4_1", LAYERS, *shape) for name, shape in SHAPES.items()}
    table = blocks("Q8_0", VOCAB, HIDDEN)
    count = LAYERS * sum(n * k for n, k in SHAPES.values())
    nbytes = sum(w.blocks.nbytes for w in weights.values())
    cases = {}
    for m in (1, 2, 4, 8, 16, 128, 256):
        x = jnp.asarray(RANDOM.standard_normal((m, HIDDEN), np.float32))
        cases[f"layers Q4_1, {m} rows"] = measure(
            lambda x=x: layers(x, weights).block_until_ready(),
            repeats,
            nbytes=nbytes,
            flop=2 * m * count,
        )
        if m <= 16:
            cases[f"head Q8_0, {m} rows"] = measure(
                lambda x=x: head(x, table).block_until_ready(),
                repeats,
                nbytes=table.blocks.nbytes,
                flop=2 * m * VOCAB * HIDDEN,
            )
    return cases


def attention_cases(repeats: int) -> dict[str, Any]:
    pages = 8 * 2304 // PAGE
    shape = (LAYERS, pages, PAGE, KV_HEADS, DIM)
    k, v = (jnp.asarray(RANDOM.standard_normal(shape, np.float32)) for _ in range(2))
    cases = {}
    for batch, queries, start in (
        (1, 1, 511),
        (1, 1, 2047),
        (8, 1, 511),
        (1, 256, 0),
        (1, 256, 768),
    ):
        table = RANDOM.permutation(pages)[: batch * 144].reshape(batch, 144).astype(np.int32)
        q = jnp.asarray(RANDOM.standard_normal((batch, queries, HEADS, DIM), np.float32))
        starts, lengths = np.full(batch, start, np.int32), np.full(batch, queries, np.int32)
        pairs = batch * sum(start + i + 1 for i in range(queries))
        cases[f"attention, {batch} x {queries} queries at {start}"] = measure(
            lambda a=(q, k, v, table, starts, lengths): attend(*a).block_until_ready(),
            repeats,
            nbytes=8 * LAYERS * batch * (start + queries) * KV_HEADS * DIM,
            flop=4 * LAYERS * pairs * HEADS * DIM,
        )
    return cases


def yardsticks(repeats: int) -> dict[str, Any]:
    source = np.ones(64 << 20, np.uint8)
    target = np.empty_like(source)
    x = RANDOM.standard_normal((256, HIDDEN), np.float32)
    w = RANDOM.standard_normal((MLP, HIDDEN), np.float32)
    return {
        "memory copy, 64 MiB": measure(
            lambda: np.copyto(target, source), repeats, nbytes=2 * source.nbytes, flop=0
        ),
        "numpy float32, 256 x 576 x 1536": measure(
            lambda: x @ w.T, repeats, nbytes=w.nbytes, flop=2 * 256 * MLP * HIDDEN
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    native.require()
    base = yardsticks(repeats)
    cases = linear_cases(repeats) | attention_cases(repeats)
    copy, product = base.values()
    for case in cases.values():
        case["of_copy"] = round(case["gb_s"] / copy["gb_s"], 2)
        case["of_numpy"] = round(case["gflop_s"] / product["gflop_s"], 2)
    receipts.show(
        {
            "what": "native CPU kernels at SmolLM2-135M's shapes",
            "repeats": repeats,
            "yardsticks": base,
            "cases": cases,
        }
    )


if __name__ == "__main__":
    main()
