"""Number formats smaller than a byte's neighbourhood: bit streams, E2M1, E8M0, spread scales.

E2M1: codes 0..7 are 0, .5, 1, 1.5, 2, 3, 4, 6, bit 3 is the sign. E8M0: byte b is 2^(b - 127),
0xFF is NaN (OCP Microscaling Formats v1.0).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def words(count: int, bits: int) -> int:
    """32-bit words of `count` fields."""
    return -(-count * bits // 32)


def unpack(stream: Any, bits: int, count: int) -> Any:
    """Fields of a little-endian stream of 32-bit words: [..., words] -> int32 [..., count].

    Field i has bits [i * bits, (i + 1) * bits), so one may lie across two words. jnp or numpy.
    """
    xp = jnp if isinstance(stream, jax.Array) else np
    stream = _as_uint32(stream)
    start = np.arange(count) * bits
    word, shift = start // 32, (start % 32).astype(np.uint32)
    value = stream[..., word] >> shift
    if 32 % bits:
        following = np.minimum(word + 1, stream.shape[-1] - 1)
        # Two shifts, since one by 32 is undefined.
        value = value | ((stream[..., following] << 1) << (31 - shift))
    return (value & np.uint32((1 << bits) - 1)).astype(xp.int32)


def pack(fields: np.ndarray, bits: int) -> np.ndarray:
    """The inverse of `unpack` on the host; the last word is filled up with zero bits."""
    *lead, count = fields.shape
    if 32 % bits == 0:
        per = 32 // bits
        full = np.zeros((*lead, words(count, bits) * per), np.uint32)
        full[..., :count] = fields.astype(np.uint32) & np.uint32((1 << bits) - 1)
        shifted = full.reshape(*lead, -1, per) << (np.arange(per) * bits).astype(np.uint32)
        return np.bitwise_or.reduce(shifted, axis=-1).view(np.int32)
    out = np.zeros((*lead, words(count, bits) + 1), np.uint32)
    fields = fields.astype(np.uint32) & np.uint32((1 << bits) - 1)
    for i in range(count):
        word, shift = divmod(i * bits, 32)
        out[..., word] |= fields[..., i] << np.uint32(shift)
        if shift + bits > 32:
            out[..., word + 1] |= fields[..., i] >> np.uint32(32 - shift)
    return np.ascontiguousarray(out[..., :-1]).view(np.int32)


def _as_uint32(stream: Any) -> Any:
    if isinstance(stream, jax.Array):
        return lax.bitcast_convert_type(stream, jnp.uint32)
    return np.ascontiguousarray(stream).view(np.uint32)


def nibbles(packed: Any, count: int) -> Any:
    """uint8 [..., ceil(count / 2)] -> int32 [..., count], the low nibble first."""
    xp = jnp if isinstance(packed, jax.Array) else np
    pair = xp.stack([packed & 15, packed >> 4], axis=-1)
    return pair.reshape(*packed.shape[:-1], -1)[..., :count].astype(xp.int32)


def pack_nibbles(codes: np.ndarray) -> np.ndarray:
    """The inverse of `nibbles` on the host; an odd row ends with a zero nibble."""
    if codes.shape[-1] % 2:
        codes = np.concatenate([codes, np.zeros_like(codes[..., :1])], axis=-1)
    codes = codes.astype(np.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4


def e2m1(codes: jax.Array) -> jax.Array:
    return jnp.asarray(E2M1)[codes]


def factors(scale: jax.Array) -> list[jax.Array]:
    """float32 factors whose product is the scale; uint8 is E8M0, others are converted.

    A power of two comes in two normal factors: XLA flushes subnormal operands, and the smallest
    scales are subnormal though their products are not.
    """
    if scale.dtype != jnp.uint8:
        return [scale.astype(jnp.float32)]
    e = scale.astype(jnp.int32)

    def power(exponent: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)

    # b - 127 in two halves; 254 halves of 1 keep both within float32's normal exponents.
    low = e // 2
    return [power(low - 63), jnp.where(e == 0xFF, jnp.nan, power(e - low - 64))]


def spread(values: jax.Array, axis: int, block: int, size: int) -> jax.Array:
    """One value per block along an axis -> one per element; block 0 is the whole axis.

    The last block may be partial.
    """
    if block == 0 or (values.shape[axis] == 1 and size <= block):
        return values
    if block == 1:
        return values
    return lax.slice_in_dim(jnp.repeat(values, block, axis), 0, size, axis=axis % values.ndim)
