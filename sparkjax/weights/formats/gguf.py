"""GGUF block formats as a pytree node, with their decoding in plain jnp.

A row of K weights is K / elements blocks, each with its own scales; rows are independent. The
layouts are ggml's (ggml-common.h, ggml-quants.c); every decoder equals the `gguf` library's
numpy one bit for bit. The products of scales and codes fit in float32's 24 bits, so neither the
order of multiplication nor a fused multiply-add changes a result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from sparkjax.mesh.units import take
from sparkjax.weights.errors import CheckpointError
from sparkjax.weights.formats import gather
from sparkjax.weights.formats.base import COLS, ROWS, Plane, QuantizedTensor
from sparkjax.weights.formats.cover import covered
from sparkjax.weights.gguf import GGML_TYPES

_F32, _I32 = jnp.float32, jnp.int32


@struct.dataclass
class GGUFTensor(QuantizedTensor):
    """A weight in GGUF blocks.

    Attributes:
      blocks: uint8 [..., N, row_bytes], as stored in the file.
      kind: ggml type name, a key of `KINDS`.
    """

    blocks: Plane
    kind: str = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape [..., N, K]."""
        kind = KINDS[self.kind]
        *lead, row_bytes = self.blocks.shape
        return (*lead, row_bytes // kind.nbytes * kind.elements)

    @property
    def lead(self) -> tuple[int, ...]:
        """Sizes of the leading axes."""
        return tuple(self.blocks.shape[:-2])

    @property
    def shares(self) -> tuple[int, int]:
        """How many shares lie side by side: blocks may be cut anywhere, so it does not matter."""
        return 1, 1

    def numbers(self) -> jax.Array:
        """float32 [..., N, K]."""
        return _decode_rows(self.blocks, self.kind)

    def pick(
        self, axis: int, index: np.ndarray, parts: int = 1, only: int | None = None
    ) -> Any:
        """See `QuantizedTensor.pick`; rows of zero bytes are zeros in every kind."""
        if axis == ROWS:
            return self.replace(blocks=take(np.asarray(self.blocks), ROWS, gather.own(index, parts, only)[0]))
        return covered(self, COLS, index, parts, KINDS[self.kind].elements, only)

    def pick_blocks(self, axis: int, blocks: np.ndarray, parts: int) -> GGUFTensor:
        """The node of whole blocks along the inputs."""
        size = KINDS[self.kind].nbytes
        at = (blocks[:, None] * size + np.arange(size)).reshape(-1)
        return self.replace(blocks=take(np.asarray(self.blocks), -1, at))

    def dequantize(self, layer: Any = None, dtype: Any = _F32) -> jax.Array:
        """See the module's `dequantize`."""
        return dequantize(self, layer, dtype)

    def take_rows(self, ids: jax.Array, dtype: Any = _F32) -> jax.Array:
        """See the module's `take_rows`."""
        return take_rows(self, ids, dtype)


def gguf_tensor(blocks: Plane, kind: str) -> GGUFTensor:
    """A checked GGUFTensor.

    Raises:
      CheckpointError: a kind without a decoder, a dtype other than uint8, or rows that are not
        whole blocks.
    """
    if kind not in KINDS:
        raise CheckpointError(f"GGUF type {kind} is not supported; allowed: {', '.join(KINDS)}")
    if blocks.dtype != jnp.uint8:
        raise CheckpointError(f"GGUF {kind} blocks have dtype {blocks.dtype}; allowed: uint8")
    if blocks.ndim < 1 or blocks.shape[-1] % KINDS[kind].nbytes:
        raise CheckpointError(
            f"GGUF {kind} blocks have shape {blocks.shape}; the last axis must be a multiple of "
            f"{KINDS[kind].nbytes} bytes"
        )
    return GGUFTensor(blocks, kind)


def dequantize(t: GGUFTensor, layer: Any = None, dtype: Any = _F32) -> jax.Array:
    """All weights [..., N, K], or those at index `layer` of the leading axes, as `dtype`."""
    return _decode_rows(t.blocks if layer is None else t.blocks[layer], t.kind).astype(dtype)


def take_rows(t: GGUFTensor, ids: jax.Array, dtype: Any = _F32) -> jax.Array:
    """Rows of a table [N, K] as [*ids.shape, K]; decodes those rows only, clamps ids."""
    ids = jnp.clip(ids, 0, t.blocks.shape[-2] - 1)
    return _decode_rows(t.blocks[ids], t.kind).astype(dtype)


def _decode_rows(rows: jax.Array, name: str) -> jax.Array:
    kind = KINDS[name]
    *lead, row_bytes = rows.shape
    blocks = rows.reshape(*lead, row_bytes // kind.nbytes, kind.nbytes)
    return kind.decode(blocks).reshape(*lead, row_bytes // kind.nbytes * kind.elements)


# Decoders: uint8 [..., nbytes] -> float32 [..., elements].


def _split(b: jax.Array, *sizes: int) -> list[jax.Array]:
    """Cuts the last axis into fields of these sizes, in file order."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [b[..., end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _half(b: jax.Array) -> jax.Array:
    """uint8 [..., 2] -> float32 [..., 1]: a little-endian fp16 scale."""
    return lax.bitcast_convert_type(b, jnp.float16).astype(_F32)[..., None]


def _int8(b: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(b, jnp.int8)


def _fields(b: jax.Array, width: int, run: int) -> jax.Array:
    """Unpacks `width`-bit codes that are stored in planes, as int32.

    Every `run` bytes hold 8 / width runs of `run` codes: the lowest bits of all bytes come first,
    then the next ones. (Neighbouring codes are never in one byte.)
    """
    *lead, n = b.shape
    shifts = jnp.arange(0, 8, width, dtype=_I32)[:, None]
    codes = (b.reshape(*lead, n // run, 1, run).astype(_I32) >> shifts) & ((1 << width) - 1)
    return codes.reshape(*lead, n * 8 // width)


def _scaled(scale: jax.Array, codes: jax.Array) -> jax.Array:
    """Multiplies equal groups of codes [..., n] by one scale each [..., groups]."""
    *lead, n = codes.shape
    grouped = codes.astype(_F32).reshape(*lead, scale.shape[-1], n // scale.shape[-1])
    return (scale[..., None] * grouped).reshape(*lead, n)


def _spread(value: jax.Array, n: int) -> jax.Array:
    """Repeats one value per group [..., groups] over its n / groups weights."""
    return jnp.repeat(value, n // value.shape[-1], axis=-1)


def _q4_0(b):
    d, qs = _split(b, 2, 16)
    return _half(d) * (_fields(qs, 4, 16) - 8).astype(_F32)


def _q4_1(b):
    d, m, qs = _split(b, 2, 2, 16)
    return _half(d) * _fields(qs, 4, 16).astype(_F32) + _half(m)


def _high_bits(qh):
    """uint8 [..., 4] -> 32 bits, lowest first, as int32 at bit 4."""
    *lead, _ = qh.shape
    bits = (qh[..., None].astype(_I32) >> jnp.arange(8, dtype=_I32)) & 1
    return bits.reshape(*lead, 32) << 4


def _q5_0(b):
    d, qh, qs = _split(b, 2, 4, 16)
    return _half(d) * ((_fields(qs, 4, 16) | _high_bits(qh)) - 16).astype(_F32)


def _q5_1(b):
    d, m, qh, qs = _split(b, 2, 2, 4, 16)
    return _half(d) * (_fields(qs, 4, 16) | _high_bits(qh)).astype(_F32) + _half(m)


def _q8_0(b):
    d, qs = _split(b, 2, 32)
    return _half(d) * _int8(qs).astype(_F32)


def _q2_k(b):
    scales, qs, d, dmin = _split(b, 16, 64, 2, 2)
    scale = _half(d) * (scales & 15).astype(_F32)
    low = _half(dmin) * (scales >> 4).astype(_F32)
    return _scaled(scale, _fields(qs, 2, 32)) - _spread(low, 256)


def _q3_k(b):
    hmask, qs, scales, d = _split(b, 32, 64, 12, 2)
    # Sixteen 6-bit scales: the low four bits in eight bytes, the high two in four.
    sc = _fields(scales[..., :8], 4, 8) | _fields(scales[..., 8:], 2, 4) << 4
    # The offset applies where the mask bit is clear.
    q = _fields(qs, 2, 32) - ((1 - _fields(hmask, 1, 32)) << 2)
    return _scaled(_half(d) * (sc - 32).astype(_F32), q)


def _k_scales(scales):
    """uint8 [..., 12] -> (scale, minimum), int32 [..., 8] each: 6-bit pairs of Q4_K and Q5_K."""
    a, m, high = (x.astype(_I32) for x in _split(scales, 4, 4, 4))
    scale = jnp.concatenate([a & 63, (high & 15) | (a >> 6) << 4], axis=-1)
    low = jnp.concatenate([m & 63, (high >> 4) | (m >> 6) << 4], axis=-1)
    return scale, low


def _k_affine(d, dmin, scales, codes):
    scale, low = _k_scales(scales)
    low = _half(dmin) * low.astype(_F32)
    return _scaled(_half(d) * scale.astype(_F32), codes) - _spread(low, 256)


def _q4_k(b):
    d, dmin, scales, qs = _split(b, 2, 2, 12, 128)
    return _k_affine(d, dmin, scales, _fields(qs, 4, 32))


def _q5_k(b):
    d, dmin, scales, qh, qs = _split(b, 2, 2, 12, 32, 128)
    return _k_affine(d, dmin, scales, _fields(qs, 4, 32) | _fields(qh, 1, 32) << 4)


def _q6_k(b):
    ql, qh, scales, d = _split(b, 128, 64, 16, 2)
    q = (_fields(ql, 4, 64) | _fields(qh, 2, 32) << 4) - 32
    return _scaled(_half(d) * _int8(scales).astype(_F32), q)


_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# e2m1 values doubled; the scales below are halved to match.
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def _lookup(table, codes):
    return jnp.asarray(table, _F32)[codes]


def _iq4_nl(b):
    d, qs = _split(b, 2, 16)
    return _half(d) * _lookup(_IQ4, _fields(qs, 4, 16))


def _iq4_xs(b):
    d, high, low, qs = _split(b, 2, 2, 4, 128)
    # Eight 6-bit scales: nibbles in byte order, and two bits each of a 16-bit word.
    sc = _fields(low, 4, 1) | _fields(high, 2, 1) << 4
    return _scaled(_half(d) * (sc - 32).astype(_F32), _lookup(_IQ4, _fields(qs, 4, 16)))


def _power_of_two(exponent):
    return lax.bitcast_convert_type((exponent + 127) << 23, _F32)


def _mxfp4(b):
    e, qs = _split(b, 1, 16)
    # The scale 2^(e - 128) in two normal factors: XLA flushes subnormal operands, and the smallest
    # scales are subnormal though their products are not.
    e = e.astype(_I32)
    codes = _lookup(_E2M1, _fields(qs, 4, 16))
    return codes * _power_of_two(e // 2 - 64) * _power_of_two(e - e // 2 - 64)


def _nvfp4(b):
    scales, qs = _split(b, 4, 32)
    exponent, mantissa = (scales >> 3 & 15).astype(_I32), (scales & 7).astype(_F32)
    normal = jnp.ldexp(1 + mantissa / 8, exponent - 7)
    d = jnp.where(exponent == 0, mantissa * 2.0**-9, normal) * 0.5
    d = jnp.where(scales == 0x7F, 0, d)  # ggml reads the NaN code as zero
    return _scaled(d, _lookup(_E2M1, _fields(qs, 4, 8)))


class Kind(NamedTuple):
    """`elements` weights in `nbytes` bytes; decode: uint8 [..., nbytes] -> f32 [..., elements]."""

    elements: int
    nbytes: int
    decode: Callable[[jax.Array], jax.Array]


_SIZES = {t.name: (t.elements, t.nbytes) for t in GGML_TYPES.values()}

KINDS: dict[str, Kind] = {
    name: Kind(*_SIZES[name], decode)
    for name, decode in {
        "Q4_0": _q4_0,
        "Q4_1": _q4_1,
        "Q5_0": _q5_0,
        "Q5_1": _q5_1,
        "Q8_0": _q8_0,
        "Q2_K": _q2_k,
        "Q3_K": _q3_k,
        "Q4_K": _q4_k,
        "Q5_K": _q5_k,
        "Q6_K": _q6_k,
        "IQ4_NL": _iq4_nl,
        "IQ4_XS": _iq4_xs,
        "MXFP4": _mxfp4,
        "NVFP4": _nvfp4,
    }.items()
}
