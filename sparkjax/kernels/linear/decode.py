"""Weight codes in 32-bit words to bfloat16, inside of a Pallas Triton kernel.

A tile of words [n, w] holds `fields` codes a word, the lowest bits first: element (n, i) of field f
is the weight at input i * fields + f. Each function gives one field of a tile, two words at a time,
as CUDA instructions on pairs of bfloat16 (`mul.bf16x2` keeps subnormal operands), and everything is
exact: products of an E2M1 code with an E4M3 scale have six significant bits, with a power of two
two; an E4M3 code has four, an integer of b bits b.

`interpret` gives the same numbers in jnp, for kernels that run on a CPU.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

FIELDS = {"e2m1": 8, "int4": 8, "e4m3": 4, "int8": 4, "bf12": 4}
"""Kind of code -> the most of them in a word."""


def _pairs(asm: str, *tiles: jax.Array) -> jax.Array:
    """bfloat16 of the tiles' shape: $0 from pairs of neighbouring words ($1, $2), ($3, $4), ..."""
    [out] = plgpu.elementwise_inline_asm(
        "{\n.reg .b32 t, u;\n" + asm + "\n}",
        args=list(tiles),
        constraints="=r" + ",r" * (2 * len(tiles)),
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(tiles[0].shape, jnp.bfloat16)],
    )
    return out


def _shift(source: str, left: int) -> str:
    """u = source shifted left (right where negative)."""
    way = "shl" if left >= 0 else "shr"
    return f"{way}.b32 u, {source}, {abs(left)};"


LIFT = 96
"""Powers of two that E4M3 scales of E2M1 codes carry, so that one multiplication does."""


def e2m1(
    words: jax.Array, field: int, scale: jax.Array, lifted: bool, interpret: bool
) -> jax.Array:
    """E2M1 codes times a scale.

    The three low bits of a code, put at the end of a bfloat16's exponent, are its magnitude times
    2^-126. A multiplication undoes that; or the scale comes times 2^LIFT, which an E4M3 scale has
    room for, and the result is 2^(LIFT - 126) of what it should be.

    Args:
      words: uint32 [n, w].
      field: 0 .. 7.
      scale: uint32 [n, w], a bfloat16 in both halves, equal for the two words of a pair.
      lifted: whether the scale comes times 2^LIFT.
    """
    if interpret:
        code = (words >> (4 * field)) & 15
        mantissa, exponent = (code & 1).astype(jnp.float32), (code >> 1) & 3
        normal = lax.bitcast_convert_type((exponent + 126) << 23, jnp.float32)
        exact = jnp.where(exponent == 0, mantissa / 2, normal * (1 + mantissa / 2))
        # Both factors are normal numbers: XLA may flush others.
        factor = _low_half(scale) * (2.0**-126 if lifted else 1.0)
        return (jnp.where(code >= 8, -exact, exact) * factor).astype(jnp.bfloat16)
    half, nibble = divmod(field, 4)
    asm = (
        f"prmt.b32 t, $1, $2, {('0x5410', '0x7632')[half]};\n"
        f"{_shift('t', 6 - 4 * nibble)}\n"
        "and.b32 u, u, 0x01C001C0;\n"
        f"shl.b32 t, t, {12 - 4 * nibble};\n"
        "lop3.b32 t, t, 0x80008000, u, 0xEA;\n"  # (t & mask) | u
    )
    if not lifted:
        asm += f"mov.b32 u, {_both(126)};\nmul.rn.bf16x2 t, t, u;\n"
    return _pairs(asm + "mul.rn.bf16x2 $0, t, $3;", words, scale)


def e4m3(words: jax.Array, field: int, scale: jax.Array | None, interpret: bool) -> jax.Array:
    """E4M3 codes, times a scale where there is one (as in `e2m1`).

    The seven low bits of a code, put across exponent and mantissa of a bfloat16, are its magnitude
    times 2^-120. NaN codes (0x7F, 0xFF) come out as 480: a checkpoint has none.
    """
    if interpret:
        code = (words >> (8 * field)) & 255
        mantissa, exponent = (code & 7).astype(jnp.float32), (code >> 3) & 15
        normal = lax.bitcast_convert_type((exponent + 120) << 23, jnp.float32)
        value = jnp.where(exponent == 0, mantissa * 2.0**-9, normal * (1 + mantissa / 8))
        value = jnp.where(code >= 128, -value, value)
        value = value if scale is None else value * _low_half(scale)
        return value.astype(jnp.bfloat16)
    asm = (
        f"prmt.b32 t, $1, $2, 0x{4 + field}{4 + field}{field}{field};\n"
        "shr.b32 u, t, 4;\n"
        "and.b32 u, u, 0x07F007F0;\n"
        "lop3.b32 t, t, 0x80008000, u, 0xEA;\n"
        f"mov.b32 u, {_both(120)};\n"
    )
    if scale is None:
        return _pairs(asm + "mul.rn.bf16x2 $0, t, u;", words)
    return _pairs(asm + "mul.rn.bf16x2 t, t, u;\nmul.rn.bf16x2 $0, t, $3;", words, scale)


def bits(
    words: jax.Array, first: int, width: int, zero: jax.Array | None, interpret: bool
) -> jax.Array:
    """Unsigned codes of 2 to 7 bits less a zero point (the middle code where there is none).

    A code in a bfloat16's mantissa under the exponent of 128 is 128 + code.

    Args:
      words: uint32 [n, w].
      first: the bit where the code begins.
      zero: None, or uint32 [n, w], 128 + zero point as a bfloat16 in both halves. Words that are
        not loaded as they lie may be paired across rows: both have their own.
    """
    mask = (1 << width) - 1
    middle = 0x4300 | 1 << width - 1
    if interpret:
        code = ((words >> first) & mask).astype(jnp.float32)
        less = 128.0 + (1 << width - 1) if zero is None else _low_half(zero)
        return (code + 128 - less).astype(jnp.bfloat16)
    half, shift = divmod(first, 16)
    if shift + width <= 16:
        asm = f"prmt.b32 t, $1, $2, {('0x5410', '0x7632')[half]};\nshr.b32 t, t, {shift};\n"
    else:
        asm = f"shr.b32 t, $1, {first};\nshr.b32 u, $2, {first};\nprmt.b32 t, t, u, 0x5410;\n"
    asm += f"and.b32 t, t, {mask * 0x10001:#x};\nor.b32 t, t, 0x43004300;\n"
    if zero is None:
        return _pairs(asm + f"mov.b32 u, {middle * 0x10001:#x};\nsub.rn.bf16x2 $0, t, u;", words)
    return _pairs(asm + "prmt.b32 u, $3, $4, 0x5410;\nsub.rn.bf16x2 $0, t, u;", words, zero)


def int8(
    words: jax.Array, field: int, offset: bool, zero: jax.Array | None, interpret: bool
) -> jax.Array:
    """Bytes as signed integers; with `offset`, less 128 instead; less a zero point where there is
    one.

    The low seven bits under the exponent of 128 are 128 + them; the sign bit there turns 128 into
    256, and the difference of the two is the number.

    Args:
      zero: None, or uint32 [n, w], the (signed) zero point as a bfloat16 in both halves.
    """
    flip = 0x80808080 if offset else 0
    if interpret:
        code = (((words ^ jnp.uint32(flip)) >> (8 * field)) & 255).astype(jnp.int32)
        value = jnp.where(code >= 128, code - 256, code).astype(jnp.float32)
        return (value if zero is None else value - _low_half(zero)).astype(jnp.bfloat16)
    asm = (
        f"prmt.b32 t, $1, $2, 0x{4 + field}{4 + field}{field}{field};\n"
        + (f"xor.b32 t, t, {flip:#x};\n" if offset else "")
        + "lop3.b32 u, t, 0x00800080, 0x43004300, 0xEA;\n"
        "and.b32 t, t, 0x007F007F;\n"
        "or.b32 t, t, 0x43004300;\n"
    )
    if zero is None:
        return _pairs(asm + "sub.rn.bf16x2 $0, t, u;", words)
    asm += "sub.rn.bf16x2 t, t, u;\nprmt.b32 u, $3, $4, 0x5410;\nsub.rn.bf16x2 $0, t, u;"
    return _pairs(asm, words, zero)


def bf12(
    low: jax.Array, codes: jax.Array, field: int, base: jax.Array, interpret: bool
) -> jax.Array:
    """Signs and mantissas in bytes, exponents that are base + a 4-bit code.

    Args:
      low: uint32 [n, w], four bytes each.
      codes: uint32 [n, w], four codes in the low half.
      base: uint32 [n, w], base << 7 in both halves.
    """
    if interpret:
        exponent = (codes >> 4 * field & 15) + (base >> 7 & 511)
        return joined(low >> 8 * field, exponent).astype(jnp.bfloat16)
    asm = (
        f"prmt.b32 t, $1, $2, 0x{4 + field}{4 + field}{field}{field};\n"
        "and.b32 t, t, 0x807F807F;\n"
        "prmt.b32 u, $3, $4, 0x5410;\n"
        f"{_shift('u', 7 - 4 * field)}\n"
        "lop3.b32 t, u, 0x07800780, t, 0xEA;\n"  # (u & mask) | t
        "add.u32 $0, t, $5;"
    )
    return _pairs(asm, low, codes, base)


def joined(low: jax.Array, exponent: jax.Array) -> jax.Array:
    """float32 of a sign and a mantissa in the lowest byte of `low` and an exponent (uint32)."""
    bits = (low & 128) << 24 | exponent << 23 | (low & 127) << 16
    return lax.bitcast_convert_type(bits, jnp.float32)


def _low_half(words: jax.Array) -> jax.Array:
    """The bfloat16 in the low half of each word, as float32."""
    return lax.bitcast_convert_type(words << 16, jnp.float32)


def _twice(bits: jax.Array) -> jax.Array:
    return bits | bits << 16


def e4m3_scale(code: jax.Array, interpret: bool) -> jax.Array:
    """E4M3 codes (uint32, 0 .. 255) times 2^LIFT as a bfloat16 in both halves of a word.

    The sign is not looked at: a scale has none, as matrix units with such scales have it.
    """
    if interpret:
        bits = ((code & 0x7F) << 7).astype(jnp.uint16)  # as a float16: 2^-8 of its value
        value = lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)
        return _twice(lax.bitcast_convert_type(value * 2.0 ** (LIFT + 8), jnp.uint32) >> 16)
    [out] = plgpu.elementwise_inline_asm(
        "{\n.reg .b32 t, u;\n"
        "and.b32 t, $1, 0x7F;\n"
        "mul.lo.u32 t, t, 0x00100010;\n"  # in both halves: 2^-120 of its value
        f"mov.b32 u, {_both(127)};\n"
        "mul.rn.bf16x2 t, t, u;\n"
        f"mov.b32 u, {_both(LIFT - 7)};\n"
        "mul.rn.bf16x2 $0, t, u;\n}",
        args=[code],
        constraints="=r,r",
        pack=1,
        # Triton's own types have no sign; the plugin takes only int32 for one here.
        result_shape_dtypes=[jax.ShapeDtypeStruct(code.shape, jnp.int32)],
    )
    return out.astype(jnp.uint32)


def _both(power: int) -> str:
    """2^power as a bfloat16 in both halves of a word."""
    return f"0x{(power + 127 << 7) * 0x10001:08X}"


def e8m0_scale(code: jax.Array) -> jax.Array:
    """E8M0 bytes b (uint32) as 2^(b - 127), a bfloat16 in both halves; 0xFF is NaN."""
    bits = jnp.where(code == 0, 0x0040, code << 7)
    return _twice(jnp.where(code == 0xFF, 0x7FC0, bits).astype(jnp.uint32))


def e8m0_float(code: jax.Array) -> jax.Array:
    """E8M0 bytes (uint32) as float32."""
    bits = jnp.where(code == 0, 0x00400000, code << 23)
    return lax.bitcast_convert_type(
        jnp.where(code == 0xFF, 0x7FC00000, bits).astype(jnp.uint32), jnp.float32
    )


def pair(value: jax.Array) -> jax.Array:
    """Integers of at most eight significant bits (int32) as a bfloat16 in both halves of a word."""
    return _twice(lax.bitcast_convert_type(value.astype(jnp.float32), jnp.uint32) >> 16)
