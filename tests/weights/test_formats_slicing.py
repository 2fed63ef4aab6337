"""Shares of a weight, for any format: a rank's node holds the rank's part of the numbers."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from sparkjax.mesh import spmd
from sparkjax.mesh.context import RANKS
from sparkjax.mesh.units import PAD, Units, even, grouped_heads, take
from sparkjax.weights import formats
from sparkjax.weights.formats import COLS, ROWS, bits
from sparkjax.weights.formats.awq import _pack as pack_awq
from sparkjax.weights.formats.awq import awq_tensor
from sparkjax.weights.formats.base import _share as share
from sparkjax.weights.formats.bf16 import bf16_tensor
from sparkjax.weights.formats.exl3 import exl3_tensor
from sparkjax.weights.formats.fp8 import fp8_tensor
from sparkjax.weights.formats.gguf import KINDS, gguf_tensor
from sparkjax.weights.formats.gptq import gptq_tensor
from sparkjax.weights.formats.int8 import int8_tensor
from sparkjax.weights.formats.mxfp4 import mxfp4_tensor
from sparkjax.weights.formats.mxfp8 import mxfp8_tensor
from sparkjax.weights.formats.nvfp4 import nvfp4_compressed, nvfp4_modelopt
from sparkjax.weights.formats.packed import packed_tensor

Rng = np.random.Generator


def fp8(rng: Rng, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn)


def f32(rng: Rng, *shape: int) -> np.ndarray:
    return (rng.random(shape) + 0.5).astype(np.float32)


def u8(rng: Rng, *shape: int) -> np.ndarray:
    return rng.integers(0, 256, shape, dtype=np.uint8)


def i32(rng: Rng, *shape: int) -> np.ndarray:
    return rng.integers(-(2**31), 2**31, shape).astype(np.int32)


def powers(rng: Rng, *shape: int) -> np.ndarray:
    return rng.integers(120, 134, shape, dtype=np.uint8)


def up(a: int, b: int) -> int:
    return -(-a // b)


def to(k: int, unit: int) -> int:
    """k rounded up: what formats without partial groups can have."""
    return up(k, unit) * unit


def fp8_block(rng: Rng, n: int, k: int):
    return fp8_tensor(fp8(rng, n, k), f32(rng, up(n, 8), up(k, 16)), (8, 16))


def fp8_powers(rng: Rng, n: int, k: int):
    scale = powers(rng, up(n, 128), up(k, 128)).view(ml_dtypes.float8_e8m0fnu)
    return fp8_tensor(fp8(rng, n, k), scale)


def ct(width: int, group: int, asymmetric: bool) -> Callable:
    def make(rng: Rng, n: int, k: int):
        g = up(k, group) if group else 1
        zero = i32(rng, bits.words(n, width), g) if asymmetric else None
        scale = f32(rng, n, g).astype(ml_dtypes.bfloat16)
        words = bits.pack(rng.integers(0, 1 << width, (n, k)), width)
        return packed_tensor(words, scale, k, zero, None, group, (width,))

    return make


def ct_ordered(rng: Rng, n: int, k: int):
    groups = rng.integers(0, 3, k).astype(np.int32)
    words = bits.pack(rng.integers(0, 16, (n, k)), 4)
    return packed_tensor(words, f32(rng, n, 3), k, i32(rng, up(n, 8), 3), groups, None, (4,))


def awq(rng: Rng, n: int, k: int):
    n = to(n, 8)
    packed = pack_awq(rng.integers(0, 16, (n, k)), 4, 1).T
    zero = i32(rng, up(k, 32), n // 8)
    return awq_tensor(packed, zero, f32(rng, up(k, 32), n).astype(np.float16), 32)


def gptq(width: int, group: int, *, v1: bool = True, planar: bool = False, order: bool = False):
    def make(rng: Rng, n: int, k: int):
        n, k = to(n, 32), to(k, 32)
        g = up(k, group) if group else 1
        scales = f32(rng, g, n).astype(np.float16)
        g_idx = rng.integers(0, g, k).astype(np.int32) if order else None
        return gptq_tensor(
            i32(rng, k * width // 32, n),
            i32(rng, g, n * width // 32),
            scales,
            g_idx,
            group,
            minus_one=v1,
            planar=planar,
            width=width,
        )

    return make


def exl3(rate: int, codebook: str) -> Callable:
    def make(rng: Rng, n: int, k: int):
        n, k = to(n, 128), to(k, 128)
        trellis = rng.integers(-(2**15), 2**15, (k // 16, n // 16, rate)).astype(np.int16)
        return exl3_tensor(
            trellis, f32(rng, k).astype(np.float16), f32(rng, n).astype(np.float16), codebook
        )

    return make


def lossless(rng: Rng, n: int, k: int):
    a = (rng.standard_normal((n, k)) * np.exp(6 * rng.standard_normal((n, 1)))).astype(
        ml_dtypes.bfloat16
    )
    return bf16_tensor(a, always=True)


def blocks(kind: str) -> Callable:
    def make(rng: Rng, n: int, k: int):
        raw = rng.integers(0, 64, (n, up(k, KINDS[kind].elements) * KINDS[kind].nbytes), dtype=np.uint8)
        return gguf_tensor(raw, kind)

    return make


def modelopt(rng: Rng, n: int, k: int):
    k = to(k, 16)
    scale = np.abs(f32(rng, n, k // 16)).astype(ml_dtypes.float8_e4m3fn)
    return nvfp4_modelopt(u8(rng, n, k // 2), scale, f32(rng))


def compressed(rng: Rng, n: int, k: int):
    k = to(k, 16)
    scale = np.abs(f32(rng, n, k // 16)).astype(ml_dtypes.float8_e4m3fn)
    return nvfp4_compressed(u8(rng, n, k // 2), scale, f32(rng, 1))


FORMATS: dict[str, Callable] = {
    "fp8_block": fp8_block,
    "fp8_powers": fp8_powers,
    "fp8_channel": lambda r, n, k: fp8_tensor(fp8(r, n, k), f32(r, n)),
    "fp8_tensor": lambda r, n, k: fp8_tensor(fp8(r, n, k), f32(r)),
    "mxfp8": lambda r, n, k: mxfp8_tensor(fp8(r, n, k), powers(r, n, up(k, 32))),
    "int8": lambda r, n, k: int8_tensor(fp8(r, n, k).view(np.int8), f32(r, n, 1)),
    "int8_zero": lambda r, n, k: int8_tensor(
        u8(r, n, k).view(np.int8), f32(r, n, up(k, 16)), u8(r, n, up(k, 16)).view(np.int8), 16
    ),
    "nvfp4_modelopt": modelopt,
    "nvfp4_compressed": compressed,
    "mxfp4": lambda r, n, k: mxfp4_tensor(u8(r, n, to(k, 32) // 2), powers(r, n, up(k, 32))),
    "ct_4": ct(4, 32, False),
    "ct_4_zero": ct(4, 32, True),
    "ct_8_channel": ct(8, 0, True),
    "ct_3": ct(3, 16, True),
    "ct_ordered": ct_ordered,
    "awq": awq,
    "gptq_4": gptq(4, 32),
    "gptq_4_ordered": gptq(4, 32, order=True),
    "gptq_3": gptq(3, 32),
    "gptq_8_v2": gptq(8, 0, v1=False),
    "gptq_5_planar": gptq(5, 32, v1=False, planar=True),
    "gptq_2": gptq(2, 64),
    "exl3_3": exl3(48, "mcg"),
    "exl3_2.5": exl3(40, "mul1"),
    "bf16": lossless,
    "Q4_1": blocks("Q4_1"),
    "Q6_K": blocks("Q6_K"),
}


VARIANTS = ("fp8_powers", "fp8_channel", "int8", "ct_4", "ct_8_channel", "gptq_8_v2", "gptq_2", "exl3_2.5")
"""Formats that differ from another one in a number; their tests are marked slow."""
EVERY = [pytest.param(n, marks=pytest.mark.slow) if n in VARIANTS else n for n in FORMATS]

run = jax.jit(formats.dequantize)


def numbers(node) -> np.ndarray:
    return np.asarray(run(jax.tree.map(jnp.asarray, node)))


def close(node, got: np.ndarray, expected: np.ndarray) -> bool:
    """Bit for bit; only EXL3's sums of 128 may be in another order."""
    if "Exl3" in str(jax.tree.structure(node)):
        return np.allclose(got, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    return np.array_equal(got, expected)


def layouts(size: int) -> list[tuple[int, np.ndarray]]:
    """Ranks and an index of `size` elements: even with padding, whole heads, repeated heads."""
    unit = next(u for u in (16, 8, 5, 4, 3, 2, 1) if size % u == 0)
    return [
        (2, even(size, 2).gather()),
        (3, even(size // unit, 3, unit).gather()),
        (4, grouped_heads(size // unit, 1, 4).queries(unit).gather()),
        (4, Units(size, (0,) * 4, 1).gather()),
    ]


@pytest.mark.parametrize("axis", [ROWS, COLS], ids=["rows", "cols"])
@pytest.mark.parametrize("name", EVERY)
def test_shares_equal_shares_of_the_numbers(name, axis):
    node = FORMATS[name](np.random.default_rng(7), 33, 70)
    whole = numbers(node)
    assert whole.shape == node.shape
    for ranks, index in layouts(node.shape[axis]):
        picked = formats.pick(node, axis, index, ranks)
        expected = take(whole, axis, index)
        assert picked.shape == expected.shape
        for rank, part in enumerate(np.split(expected, ranks, axis)):
            mine = share(picked, axis, rank, ranks)
            assert mine.shape == part.shape
            assert close(node, numbers(mine), part)
            # A rank that picks its own share alone holds the same bits in the same structure.
            alone = formats.pick(node, axis, index, ranks, rank)
            assert jax.tree.structure(alone) == jax.tree.structure(picked)
            jax.tree.map(np.testing.assert_array_equal, alone, mine)
    # Shares side by side are numbers too, without a mesh.
    assert close(node, numbers(picked), expected)


@pytest.mark.parametrize("axis", [ROWS, COLS], ids=["rows", "cols"])
@pytest.mark.parametrize(
    "name",
    ["fp8_block", "nvfp4_modelopt", "mxfp4", "ct_4", "ct_4_zero", "ct_3", "awq", "gptq_4", "gptq_3", "exl3_3", "Q4_1"],
)
def test_a_share_of_whole_blocks_is_views_of_the_file(name, axis):
    """Whole blocks, words and pairs are cut out without being read or packed anew."""
    node = FORMATS[name](np.random.default_rng(7), 256, 512)
    whole = numbers(node)
    size = node.shape[axis] // 2
    alone = formats.pick(node, axis, np.arange(2 * size), 2, 1)
    main = max(jax.tree.leaves(alone), key=lambda plane: plane.nbytes)
    assert any(np.shares_memory(main, plane) for plane in jax.tree.leaves(node))
    assert close(node, numbers(alone), take(whole, axis, np.arange(size, 2 * size)))


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=6, derandomize=True, deadline=None)
@given(data=st.data())
def test_any_pick_after_any_pick(name, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    n, k = data.draw(st.integers(3, 40)), data.draw(st.integers(5, 80))
    node = FORMATS[name](rng, n, k)
    for _ in range(2):
        axis = data.draw(st.sampled_from([ROWS, COLS]))
        size, whole = node.shape[axis], numbers(node)
        kind = data.draw(st.sampled_from(["range", "any"]))
        if kind == "range":
            a = data.draw(st.integers(0, size - 1))
            index = np.arange(a, data.draw(st.integers(a + 1, size)))
        else:
            index = np.array(data.draw(st.lists(st.integers(PAD, size - 1), min_size=1, max_size=20)))
        node = formats.pick(node, axis, index)
        assert close(node, numbers(node), take(whole, axis, index))


@pytest.mark.parametrize("name", EVERY)
def test_stacks_index_and_give_rows(name):
    rng = np.random.default_rng(5)
    members = [FORMATS[name](rng, 24, 64) for _ in range(6)]
    whole = np.stack([numbers(m) for m in members]).reshape(2, 3, *members[0].shape)
    stacked = jax.tree.map(jnp.asarray, formats.stack(members, (2, 3)))
    assert formats.logical_shape(stacked) == whole.shape and stacked.ndim == 4
    assert close(members[0], np.asarray(run(stacked)), whole)
    assert close(members[0], np.asarray(run(stacked, (jnp.int32(1), jnp.int32(2)))), whole[1, 2])
    assert close(members[0], np.asarray(run(stacked, 1)), whole[1])
    ids = jnp.array([[3, 0, 99], [23, 23, -7]])
    rows = jax.jit(formats.take_rows)(jax.tree.map(jnp.asarray, members[4]), ids)
    wanted = whole[1, 1][np.clip(np.asarray(ids), 0, whole.shape[-2] - 1)]
    assert close(members[0], np.asarray(rows), wanted)
    half = formats.dequantize(stacked, (0, 1), jnp.bfloat16)
    assert half.dtype == jnp.bfloat16


@pytest.mark.parametrize("axis", [ROWS, COLS], ids=["rows", "cols"])
@pytest.mark.parametrize("name", ["fp8_block", "fp8_tensor", "nvfp4_compressed", "awq", "gptq_4", "bf16", "Q4_1"])
def test_a_mesh_cuts_every_plane_by_the_matrix_spec(name, axis):
    ranks = 3
    mesh = spmd.make_mesh(ranks)
    node = FORMATS[name](np.random.default_rng(0), 40, 72)
    index = even(node.shape[axis] // 4, ranks, 4).gather()
    expected = take(numbers(node), axis, index)
    stacked = formats.stack([formats.pick(node, axis, index, ranks)] * 2, (2,))
    spec = PartitionSpec(None, *((RANKS, None) if axis == ROWS else (None, RANKS)))
    place = spmd.shardings(mesh, spec)
    held = jax.tree.map(lambda a: jax.device_put(a, place), stacked)
    spread = spmd.spmd(lambda w: formats.dequantize(w, 1), mesh, (spec,), PartitionSpec(*spec[1:]))
    np.testing.assert_array_equal(np.asarray(jax.jit(spread)(held)), expected)


@pytest.mark.parametrize("traced", [False, True])
def test_layers_of_several_formats_are_one_parameter(traced):
    rng = np.random.default_rng(1)
    dense = rng.standard_normal((24, 64)).astype(ml_dtypes.bfloat16)
    names = ["mxfp4", "fp8_block", "mxfp4", None, "fp8_tensor", "fp8_block"]
    members = [dense if n is None else FORMATS[n](rng, 24, 64) for n in names]
    mixed = jax.tree.map(jnp.asarray, formats.stack(members, (3, 2)))
    assert formats.is_quantized(mixed) and formats.logical_shape(mixed) == (3, 2, 24, 64)
    assert len(mixed.stacks) == 4
    run = jax.jit(formats.dequantize) if traced else formats.dequantize
    for i in range(6):
        at = divmod(i, 2)
        at = tuple(map(jnp.int32, at)) if traced else at
        expected = numbers(members[i]) if names[i] else dense.astype(np.float32)
        np.testing.assert_array_equal(np.asarray(run(mixed, at)), expected)
    both = np.asarray(run(mixed, jnp.int32(1) if traced else 1))
    np.testing.assert_array_equal(both, np.stack([numbers(members[2]), dense.astype(np.float32)]))
    assert run(mixed).shape == (3, 2, 24, 64)
