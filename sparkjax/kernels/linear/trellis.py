"""EXL3's trellis inside of a Pallas Triton kernel: ring bits to float16.

A tile of 16 inputs x 16 outputs at K bits a weight is a ring of 8 K words. Its lane t (0 .. 31) has the
values 8 t .. 8 t + 7, and value 4 s + 2 h + f of lane 4 r + q is that of

    output 8 s + r,    input 8 h + 2 q + f:

where `mma.sync` wants them in the registers of its lane, so that nothing has to move between them.

The states of a lane are 16 bits each of the 8 K + 16 that begin at bit 8 K t - 16 of the ring, at places
that are the same for all lanes, half-integer K too. The arithmetic is that of `formats.exl3`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

from ...weights.formats.exl3 import MULTIPLIERS, TILE, codebook_value

LANES = 32


def words_of(rate: int) -> int:
    """Words of the ring that a lane's states may lie in, at rate = 8 K."""
    most = max((lane * rate - 16) % 32 for lane in range(LANES))
    return -(-(most + rate + 16) // 32)


def _first(rate: int) -> jax.Array:
    """int32 [32]: where each lane's bits begin; a whole ring more, so that nothing is negative."""
    return jnp.arange(LANES, dtype=jnp.int32) * rate + (LANES * rate - 16)


def load(
    plane: Any, member: jax.Array, n0: Any, k0: Any, shape: tuple[int, int], rate: int
) -> list[jax.Array]:
    """The words that the states of each lane lie in, uint32 [tiles along K, along N, 32] each.

    Args:
      plane: Ref of uint32 [M, outputs / 16, inputs / 16 * rate].
      n0, k0: the first output and input, of whole tiles.
      shape: outputs and inputs; past the last input the last tile is read.
      rate: 8 K, the words of a tile.
    """
    outs, ins = (size // TILE for size in shape)
    out = n0 // TILE + jnp.arange(outs, dtype=jnp.int32)
    tile = k0 // TILE + jnp.arange(ins, dtype=jnp.int32)
    tile = jnp.minimum(tile, plane.shape[-1] // rate - 1) * rate
    found = []
    for i in range(words_of(rate)):
        word = (_first(rate) // 32 + i) % rate
        index = (member, out[None, :, None], tile[:, None, None] + word[None, None, :])
        found.append(
            plgpu.load(plane.at[tuple(jnp.broadcast_to(x, (ins, outs, LANES)) for x in index)])
        )
    return found


def values(
    words: list[jax.Array], rate: int, codebook: str, as_e4m3: bool, interpret: bool
) -> jax.Array:
    """float16 [outputs, inputs] of the words that `load` gives."""
    window = _windows(words, rate)
    pairs = [_pair(window, j, rate, codebook, as_e4m3, interpret) for j in (0, 2, 4, 6)]
    # Joined from the last axis on: [K tiles, N tiles, lane, s, h, f].
    found = jnp.stack(
        [jnp.stack([jnp.stack(pairs[2 * s + h], -1) for s in (0, 1)], -1) for h in (0, 1)], -1
    )
    ins, outs, _ = words[0].shape
    found = found.reshape(ins, outs, 8, 4, 2, 2, 2)  # ..., r, q, f, s, h
    return found.transpose(1, 5, 2, 0, 6, 3, 4).reshape(outs * TILE, ins * TILE)


def _windows(words: list[jax.Array], rate: int) -> list[jax.Array]:
    """The 8 K + 16 bits of each lane's states, the first bit highest."""
    if rate % 32 == 0:
        return words  # every lane begins in the middle of a word, see `_state`
    shift = (_first(rate) % 32).astype(jnp.uint32)[None, None, :]
    aligned = []
    for i in range(-(-(rate + 16) // 32)):
        word = words[i] << shift
        if i + 1 < len(words):
            # Two shifts, since one by 32 is undefined.
            word = word | (words[i + 1] >> 1) >> (31 - shift)
        aligned.append(word)
    return aligned


def _place(j: int, rate: int) -> tuple[int, int]:
    """The word of a window, and the bit there, where state j begins."""
    return divmod((16 if rate % 32 == 0 else 0) + (j + 1) * rate // 8, 32)


def _pair(
    window: list[jax.Array], j: int, rate: int, codebook: str, as_e4m3: bool, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """Values j and j + 1 of each lane, float16."""
    places = [_place(i, rate) for i in (j, j + 1)]
    if interpret:
        found = []
        for at, bit in places:
            if bit <= 16:
                state = window[at] >> 16 - bit
            else:
                state = window[at] << bit - 16 | window[at + 1] >> 48 - bit
            value = codebook_value(state & 0xFFFF, codebook)
            if as_e4m3:
                value = jnp.clip(value, -448, 448).astype(jnp.float8_e4m3fn).astype(jnp.float16)
            found.append(value)
        return found[0], found[1]
    used = sorted({i for at, bit in places for i in ((at,) if bit <= 16 else (at, at + 1))})
    name = {at: f"${1 + i}" for i, at in enumerate(used)}
    asm = ""
    for register, (at, bit) in zip("tu", places, strict=True):
        if bit <= 16:
            asm += f"bfe.u32 {register}, {name[at]}, {16 - bit}, 16;\n"
        else:
            asm += (
                f"shf.r.wrap.b32 {register}, {name[at + 1]}, {name[at]}, {48 - bit};\n"
                f"and.b32 {register}, {register}, 0xFFFF;\n"
            )
    asm += _HASHES[codebook]
    if as_e4m3:
        asm += "cvt.rn.satfinite.e4m3x2.f16x2 h, v;\ncvt.rn.f16x2.e4m3x2 v, h;\n"
    # One result, as Pallas takes no more: both in a word, to be packed as they were.
    [both] = plgpu.elementwise_inline_asm(
        "{\n.reg .b32 t, u, v;\n.reg .b16 h;\n" + asm + "mov.b32 $0, v;\n}",
        args=[window[at] for at in used],
        constraints="=r" + ",r" * len(used),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(window[0].shape, jnp.int32)],
    )
    halves = both, lax.shift_right_logical(both, jnp.int32(16))
    first, second = (lax.bitcast_convert_type(h.astype(jnp.int16), jnp.float16) for h in halves)
    return first, second


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
