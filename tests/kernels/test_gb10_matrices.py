"""`linear` and the expert layer compiled for GB10: within its shared memory, no copies of weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import packed_weights as weights
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from sparkjax.kernels.linear import triton
from sparkjax.kernels.moe import triton as moe
from sparkjax.mesh import gb10
from sparkjax.models.layers.mlp import silu

pytestmark = pytest.mark.gb10
N, K = 512, 2048


@pytest.fixture(scope="module")
def place():
    try:
        return NamedSharding(gb10.compile_only_mesh(), PartitionSpec())
    except gb10.Unavailable as error:
        pytest.skip(str(error))


def temporaries(function, place, *arguments):
    """Bytes that the program compiled for these needs beside arguments and results. A kernel that
    wants more than a block's 101,376 bytes of shared memory does not compile."""
    shapes = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), arguments
    )
    return jax.jit(function).lower(*shapes).compile().memory_analysis().temp_size_in_bytes


OTHERS = ("int4 by 32", "awq by 32", "int8 zeros", "gptq 7 bits", "gptq 7 bits planar", "gptq 8 bits",
          *weights.GGUF, "exl3 4 mcg", "exl3 2.5 mul1", "exl3 8 mul1", "exl3 3 mcg/e4m3")  # fmt: skip
QUICK = ("fp8 block", "nvfp4", "awq", "exl3 4 mcg")
"""Some of all kinds; they are compiled by default, at the first count of rows."""


def sizes(kinds, *rows):
    """Every format at every count of rows."""
    return pytest.mark.parametrize(
        "kind, rows",
        [
            pytest.param(k, n, marks=[] if k in QUICK and n == rows[0] else [pytest.mark.slow])
            for k in kinds
            for n in rows
        ],
    )


@sizes([*weights.FORMATS, *OTHERS], 1, 16, 64)
def test_linear_reads_the_stack_in_place(place, kind, rows):
    stack = weights.weight(kind, (2,), N, K)
    found = temporaries(lambda x, w: triton.linear(x, w, 1), place, weights.rows(rows, K), stack)
    # x by fields, and the parts of sums that programs share.
    assert found <= rows * (2 * K + 16 * 4 * N) + 4096


@sizes([*weights.FORMATS, *OTHERS], 256)
def test_many_rows_need_one_panel(place, kind, rows):
    stack = weights.weight(kind, (2,), N, K)
    found = temporaries(lambda x, w: triton.linear(x, w, 1), place, weights.rows(rows, K), stack)
    # In a rotated basis x and sums are there too.
    more = rows * (2 * K + 4 * N + 4) if kind.startswith("exl3") else 0
    assert found <= (0 if kind == "bf16" else 2 * N * K) + more + 4096


@sizes(weights.FORMATS, 64, 1, 512)
def test_experts_read_the_stacks_in_place(place, kind, rows):
    count, k, width = 8, 2, 256
    gate, up = (weights.weight(kind, (2, count), width, N) for _ in range(2))
    down = weights.weight(kind, (2, count), N, width)
    ids = jnp.zeros((rows, k), jnp.int32)
    share = jnp.zeros((rows, k), jnp.float32)
    run = lambda x, i, s, g, u, d: moe.experts(x, i, s, g, u, d, 1, silu)  # noqa: E731
    found = temporaries(run, place, weights.rows(rows, N), ids, share, gate, up, down)
    # Hidden and output rows of every pair, x by fields, the tiles' lists.
    assert found <= rows * (k * (4 * width + 6 * N) + 2 * N) + 65536
