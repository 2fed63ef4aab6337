"""Random weights in every format, made on the device: [lead..., N, K] of usual scales."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sparkjax.weights.formats.awq import AwqTensor
from sparkjax.weights.formats.base import ROWS
from sparkjax.weights.formats.bf16 import Bf16Tensor
from sparkjax.weights.formats.cover import Covered
from sparkjax.weights.formats.exl3 import ROTATION, Exl3Tensor
from sparkjax.weights.formats.fp4 import Fp4Tensor
from sparkjax.weights.formats.gguf import KINDS, GGUFTensor
from sparkjax.weights.formats.gptq import GptqTensor
from sparkjax.weights.formats.packed import PackedTensor
from sparkjax.weights.formats.scaled import ScaledTensor

FORMATS = (
    "bf16", "bf16 in 12 bits", "fp8 channel", "fp8 block", "mxfp8", "int8", "nvfp4", "mxfp4", "int4",
    "int4 by 32", "gptq", "gptq 3 bits", "awq", "exl3", "gguf Q4_0", "gguf Q4_1", "gguf Q8_0",
    "gguf Q4_K", "gguf Q6_K",
)  # fmt: skip
_HALVES = {"Q4_0": {0: 0.2}, "Q4_1": {0: 0.2, 2: -1.5}, "Q8_0": {0: 0.014},
           "Q4_K": {0: 0.006, 2: 0.04}, "Q6_K": {208: 0.0007}}  # fmt: skip
"""GGUF type -> where the float16 of a block stand, and their size where weights are of order one."""


def weight(key: jax.Array, kind: str, lead: tuple[int, ...], n: int, k: int) -> Any:
    """A weight whose products with unit rows are of order one.

    Args:
      kind: one of FORMATS; int4 ("by 32" excepted), GPTQ (v1, 4 bits where none are named) and AWQ
        have groups of 128, EXL3 has 4 bits ("exl3 2 bits" has 2) and mcg (half bits: mul1), 12 bits
        two escapes a row.
    """
    codes, scales = jax.random.split(key)

    def data(*shape: int, dtype: Any = jnp.uint8) -> jax.Array:
        return jax.random.bits(codes, (*lead, *shape), dtype)

    def scale(*shape: int, by: float) -> jax.Array:
        # Near powers of two and not only those, over two octaves.
        return jax.random.uniform(scales, (*lead, *shape), minval=by / 2, maxval=2 * by)

    def power(*shape: int, by: float) -> jax.Array:
        middle = 127 + round(math.log2(by))
        return jax.random.randint(scales, (*lead, *shape), middle - 1, middle + 2).astype(jnp.uint8)

    unit = 1 / math.sqrt(k)
    if kind == "bf16":
        return jax.random.normal(codes, (*lead, n, k), jnp.bfloat16) * jnp.bfloat16(unit)
    if kind in ("nvfp4", "mxfp4"):
        packed = data(n, k // 2)
        if kind == "mxfp4":
            return Fp4Tensor(packed, power(n, k // 32, by=unit / 3), None, False, 32, n, k)
        groups = scale(n, k // 16, by=8.0).astype(jnp.float8_e4m3fn)
        whole = jnp.full((*lead, 1, 1), unit / 24, jnp.float32)
        return Fp4Tensor(packed, groups, whole, False, 16, n, k)
    if kind.startswith("int4"):
        words = lax.bitcast_convert_type(data(n, k // 8, dtype=jnp.uint32), jnp.int32)
        group = 32 if kind == "int4 by 32" else 128
        groups = scale(n, k // group, by=unit / 5).astype(jnp.bfloat16)
        return PackedTensor(words, groups, None, None, 4, group, n, k)
    if kind.startswith("gguf"):
        name = kind.split()[1]
        blocks = data(n, k // KINDS[name].elements, KINDS[name].nbytes)
        for at, by in _HALVES[name].items():
            halves = (scale(*blocks.shape[-3:-1], 1, by=abs(by) * unit) * math.copysign(1, by)).astype(jnp.float16)
            pair = lax.bitcast_convert_type(halves, jnp.uint8)[..., 0, :]
            blocks = blocks.at[..., at : at + 2].set(pair)
        return GGUFTensor(blocks.reshape(*lead, n, -1), name)
    if kind.startswith("gptq") or kind == "awq":
        words = partial(lax.bitcast_convert_type, new_dtype=jnp.int32)
        width = 3 if kind == "gptq 3 bits" else 4
        groups = scale(n, k // 128, by=unit / 2**(width - 1)).astype(jnp.float16)
        zero = words(data(n * width // 32, k // 128, dtype=jnp.uint32))
        if kind != "awq":
            packed = words(data(n, k * width // 32, dtype=jnp.uint32))
            return GptqTensor(packed, zero, groups, None, width, False, True, 128, n, k)
        return AwqTensor(words(data(n // 8, k, dtype=jnp.uint32)), zero, groups, 4, 128, n, k)
    if kind.startswith("exl3"):
        rate = float(kind.split()[1]) if kind != "exl3" else 4.0
        raw = data(n // 16, k // 16, int(16 * rate), dtype=jnp.uint16)
        tiles, book = lax.bitcast_convert_type(raw, jnp.int16), "mul1" if rate % 1 else "mcg"
        out, into = scale(n, 1, by=unit).astype(jnp.float16), scale(1, k, by=1.0)
        return Exl3Tensor(tiles, out, into.astype(jnp.float16), book, False, n, k)
    if kind == "bf16 in 12 bits":
        return _twelve_bits(data, lead, n, k, unit)
    if kind == "int8":
        words = lax.bitcast_convert_type(data(n, k), jnp.int8)
        return ScaledTensor(words, scale(n, 1, by=unit / 70), None, (1, 0), n, k)
    # E4M3 without NaN, and without the largest exponents, which would leave the rest no weight.
    fp8 = lax.bitcast_convert_type(data(n, k) & 0xBF, jnp.float8_e4m3fn)
    if kind == "mxfp8":
        return ScaledTensor(fp8, power(n, k // 32, by=unit), None, (1, 32), n, k)
    if kind == "fp8 channel":
        return ScaledTensor(fp8, scale(n, 1, by=unit), None, (1, 0), n, k)
    blocks = scale(-(-n // 128), -(-k // 128), by=unit)
    return ScaledTensor(fp8, blocks, None, (128, 128), n, k)


def _twelve_bits(data: Any, lead: tuple[int, ...], n: int, k: int, unit: float) -> Bf16Tensor:
    """Exponents over fifteen octaves; in each half of a row the smallest of all escapes."""
    base = 127 + round(math.log2(unit)) - 14
    codes = jnp.maximum(data(n, k) & 15, 1)
    at = jnp.arange(k)
    first, second = (data(n, 1, dtype=jnp.uint32) >> by for by in (0, 8))
    columns = jnp.concatenate([first % (k // 2), k // 2 + second % (k // 2)], -1)
    codes = jnp.where((columns[..., None] == at).any(-2), 0, codes)
    packed = codes[..., ::2] | codes[..., 1::2] << 4
    places = (jnp.arange(n)[:, None] * k + columns.astype(jnp.int32)).reshape(*lead, 1, 2 * n)
    starts = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32)[:, None] * 2, (*lead, n, 1))
    exponents = jnp.full((*lead, 1, 2 * n), base - 2, jnp.uint8)
    bases = jnp.full((*lead, 1, 1), base, jnp.int32)
    return Bf16Tensor(data(n, k), packed, bases, places, exponents, starts, 2, n, k)


def cut(node: Any, axis: int, size: int) -> Any:
    """`size` rows (or columns, by `axis`) of a node, from the middle of its blocks of 128."""
    lead, (n, k) = node.lead, node.shape[-2:]
    at = jnp.arange(size, dtype=jnp.int32) + (node.shape[axis] - size) // 2
    if axis == ROWS:
        return Covered(node, jnp.broadcast_to(at[:, None], (*lead, size, 1)), axis, ROTATION, size, k)
    return Covered(node, jnp.broadcast_to(at, (*lead, 1, size)), axis, ROTATION, n, size)


def size(kind: str, n: int, k: int) -> int:
    """Bytes of one matrix."""
    shapes = jax.eval_shape(lambda key: weight(key, kind, (), n, k), jax.random.key(0))
    return sum(math.prod(s.shape) * s.dtype.itemsize for s in jax.tree.leaves(shapes))
