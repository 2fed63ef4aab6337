"""EXL3's trellis inside of a Pallas Triton kernel: ring bits to float16.

A tile of 16 inputs x 16 outputs at K bits a weight is a ring of 8 K words. Its lane t (0 .. 31) has the
values 8 t .. 8 t + 7, of 2 outputs x 4 inputs: an element of the kernels, in row t / 4 of the tile's
eight and column t % 4 of its four. Value 4 s + f of a lane is that of slot s and field f,

    output t / 4 + 8 s,    input 2 (t % 4) + (f & 1) + 8 (f >> 1).

The states of a lane are 16 bits each of the 8 K + 16 that begin at bit 8 K t - 16 of the ring, at places
that are the same for all lanes, half-integer K too. The arithmetic is that of `formats.exl3`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from ...weights.formats.exl3 import MULTIPLIERS, codebook_value

LANES = 32


def words_of(rate: int) -> int:
    """Words of the ring that a lane's states may lie in, at rate = 8 K."""
    most = max((lane * rate - 16) % 32 for lane in range(LANES))
    return -(-(most + rate + 16) // 32)


def windows(
    plane: Any, member: jax.Array, row: jax.Array, column: jax.Array, rate: int
) -> list[jax.Array]:
    """The 8 K + 16 bits of each element's states, the first bit highest, as uint32 [n, w] each.

    Args:
      plane: Ref of uint32 [M, outputs / 16, inputs / 16 * rate].
      row: int32 [n], rows of elements.
      column: int32 [w], columns; past the end the last tile is read.
      rate: 8 K, the words of a tile.
    """
    shape = (row.shape[0], column.shape[0])
    column = jnp.minimum(column, plane.shape[-1] // rate * 4 - 1)
    lane = (row % 8 * 4)[:, None] + (column % 4)[None, :]
    # A whole ring more, so that nothing is negative.
    bit = lane * rate + (32 * rate - 16)
    first = bit // 32
    tile = (column // 4 * rate)[None, :]

    def load(i: int) -> jax.Array:
        index = (member, (row // 8)[:, None], tile + (first + i) % rate)
        return plgpu.load(plane.at[tuple(jnp.broadcast_to(x, shape) for x in index)])

    found = [load(i) for i in range(words_of(rate))]
    if rate % 32 == 0:
        return found  # every lane begins in the middle of a word, see `place`
    shift = (bit % 32).astype(jnp.uint32)
    aligned = []
    for i in range(-(-(rate + 16) // 32)):
        word = found[i] << shift
        if i + 1 < len(found):
            # Two shifts, since one by 32 is undefined.
            word = word | (found[i + 1] >> 1) >> (31 - shift)
        aligned.append(word)
    return aligned


def value(
    window: list[jax.Array], j: int, rate: int, codebook: str, as_e4m3: bool, interpret: bool
) -> jax.Array:
    """float16 [n, w]: value j of each element's eight."""
    bit = (16 if rate % 32 == 0 else 0) + (j + 1) * rate // 8
    at, start = bit // 32, bit % 32
    high = window[at]
    low = window[at + 1] if start > 16 else None
    if interpret:
        state = high >> 16 - start if low is None else high << start - 16 | low >> 48 - start
        values = codebook_value(state & 0xFFFF, codebook)
        if as_e4m3:
            values = jnp.clip(values, -448, 448).astype(jnp.float8_e4m3fn).astype(jnp.float16)
        return values
    if low is None:
        asm = f"bfe.u32 t, $1, {16 - start}, 16;\nbfe.u32 u, $2, {16 - start}, 16;\n"
    else:
        asm = (
            f"shf.r.wrap.b32 t, $3, $1, {48 - start};\nand.b32 t, t, 0xFFFF;\n"
            f"shf.r.wrap.b32 u, $4, $2, {48 - start};\nand.b32 u, u, 0xFFFF;\n"
        )
    asm += _HASHES[codebook]
    if as_e4m3:
        asm += "cvt.rn.satfinite.e4m3x2.f16x2 h, v;\ncvt.rn.f16x2.e4m3x2 v, h;\n"
    tiles = [high] if low is None else [high, low]
    [out] = plgpu.elementwise_inline_asm(
        "{\n.reg .b32 t, u, v;\n.reg .b16 h;\n" + asm + "mov.b32 $0, v;\n}",
        args=tiles,
        constraints="=r" + ",r" * (2 * len(tiles)),
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(high.shape, jnp.float16)],
    )
    return out


# (x & 0x8FFF8FFF) ^ 0x3B603B60, then the sum of the halves of each.
_SUM = (
    "lop3.b32 t, t, 0x8FFF8FFF, 0x3B603B60, 0x6A;\n"
    "lop3.b32 u, u, 0x8FFF8FFF, 0x3B603B60, 0x6A;\n"
    "prmt.b32 v, t, u, 0x5410;\n"
    "prmt.b32 t, t, u, 0x7632;\n"
    "add.rn.f16x2 v, v, t;\n"
)
_HASHES = {
    "3inst": "mad.lo.u32 t, t, 89226354, 64248484;\nmad.lo.u32 u, u, 89226354, 64248484;\n" + _SUM,
    "mcg": f"mul.lo.u32 t, t, {MULTIPLIERS['mcg']:#x};\nmul.lo.u32 u, u, {MULTIPLIERS['mcg']:#x};\n"
    + _SUM,
    # 0x6400 + s is 1024 + s as a float16.
    "mul1": f"mul.lo.u32 t, t, {MULTIPLIERS['mul1']:#x};\nmul.lo.u32 u, u, {MULTIPLIERS['mul1']:#x};\n"
    "dp4a.u32.u32 t, t, 0x01010101, 0x6400;\n"
    "dp4a.u32.u32 u, u, 0x01010101, 0x6400;\n"
    "prmt.b32 v, t, u, 0x5410;\n"
    "mov.b32 t, 0x1EEE1EEE;\n"
    "mov.b32 u, 0xC931C931;\n"
    "fma.rn.f16x2 v, v, t, u;\n",
}
"""States in t and u to a pair of float16 in v."""
