"""EXL3 (exllamav3): tail-biting trellis codes in a basis rotated by Hadamard transforms.

    W[in, out] = diag(suh) H T H diag(svh)

T is cut into tiles of 16 x 16. A tile of K bits a weight is a ring of 256 K bits; the value at
stream position p is a hash of the 16 ring bits that end at floor((p + 1) K), so K may be a half
integer. H is block diagonal: Sylvester Hadamard matrices of 128, divided by sqrt(128). Files hold
trellis int16 [in / 16, out / 16, 16 K]; a node holds [out / 16, in / 16, 16 K].

Codebooks (state: 16 bits, arithmetic modulo 2^32):
    3inst  x = state * 89226354 + 64248484
    mcg    x = state * 0xCBAC1FED
           then x = x & 0x8FFF8FFF ^ 0x3B603B60, value = fp16(low half) + fp16(high half)
    mul1   x = state * 0x83DCD12D, value = fp16 of (1024 + sum of x's bytes) * c + d
with one rounding to fp16 each. Sources: exllamav3 1.6 `codebook.cuh`, `exl3_dq.cuh`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from ...mesh.units import take
from ..errors import CheckpointError
from . import gather
from .base import COLS, ROWS, Plane, QuantizedTensor
from .cover import covered

TILE, ROTATION = 16, 128
CODEBOOKS = ("3inst", "mcg", "mul1")
MULTIPLIERS = {"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}


@struct.dataclass
class Exl3Tensor(QuantizedTensor):
    """A weight in EXL3's trellis.

    Attributes:
      trellis: int16 [..., out / 16, in / 16, 16 K].
      out_scale: float16 [..., N padded, 1] (svh).
      in_scale: float16 [..., 1, K padded] (suh).
      codebook: one of CODEBOOKS.
      as_e4m3: whether decoded values are rounded to E4M3 (EXLR8).
    """

    trellis: Plane
    out_scale: Plane
    in_scale: Plane
    codebook: str = struct.field(pytree_node=False)
    as_e4m3: bool = struct.field(pytree_node=False)
    rows: int = struct.field(pytree_node=False)
    cols: int = struct.field(pytree_node=False)

    def _main(self) -> tuple[jax.Array, int, int, int]:
        return self.trellis, 3, _tiles(self.rows), _tiles(self.cols)

    def numbers(self) -> jax.Array:
        """See the module."""
        t = decode(self.trellis, self.codebook, self.as_e4m3).astype(jnp.float32)
        w = rotate(rotate(t, COLS), ROWS)
        w = w * self.out_scale.astype(jnp.float32) * self.in_scale.astype(jnp.float32)
        return w[..., : self.rows, : self.cols]

    def pick(
        self, axis: int, index: np.ndarray, parts: int = 1, only: int | None = None
    ) -> Any:
        """See `QuantizedTensor.pick`: whole blocks of 128, and an index into them where needed."""
        if gather.is_identity(index, self.shape[axis], parts):
            return self
        return covered(self, axis, index, parts, ROTATION, only)

    def pick_blocks(self, axis: int, blocks: np.ndarray, parts: int) -> Exl3Tensor:
        """The node of whole rotation blocks (of 128 rows or columns each), equally many a part."""
        size = len(blocks) // parts * ROTATION

        def at(plane: np.ndarray, axis: int, unit: int) -> np.ndarray:
            index = (blocks[:, None] * unit + np.arange(unit)).reshape(-1)
            return take(plane, axis, index)

        tiles = ROTATION // TILE
        trellis = at(np.asarray(self.trellis), axis - 1, tiles)
        inner, outer = np.asarray(self.in_scale), np.asarray(self.out_scale)
        if axis == ROWS:
            return self.replace(
                trellis=trellis,
                out_scale=at(outer, ROWS, ROTATION),
                in_scale=gather.copies(inner, ROWS, parts),
                rows=size,
            )
        return self.replace(
            trellis=trellis,
            out_scale=gather.copies(outer, COLS, parts),
            in_scale=at(inner, COLS, ROTATION),
            cols=size,
        )

    def cropped(self, rows: int, cols: int) -> Exl3Tensor:
        """The same with fewer of the rows and columns that padding to 128 has added.

        Raises:
          CheckpointError: that would leave a whole block unused, or needs more than there is.
        """
        n, k = self.shape[-2:]
        if _tiles(rows) != _tiles(n) or _tiles(cols) != _tiles(k) or rows > n or cols > k:
            raise CheckpointError(f"a trellis of [{n}, {k}] does not hold a matrix of [{rows}, {cols}]")
        return self.replace(rows=rows, cols=cols)


def _tiles(size: int) -> int:
    return -(-size // ROTATION) * (ROTATION // TILE)


def _order() -> np.ndarray:
    """int [256]: the stream position of element (out, in) of a tile, out-major.

    The order of the m16n8k16 fragment: lane p // 8 owns two fragments of four values.
    """
    p = np.arange(TILE * TILE)
    t, j = p >> 3, p & 7
    row = 2 * (t & 3) + (j & 1) + 8 * ((j >> 1) & 1)
    col = (t >> 2) + 8 * (j >> 2)
    order = np.empty(TILE * TILE, np.int64)
    order[col * TILE + row] = p
    return order


def decode(trellis: jax.Array, codebook: str, as_e4m3: bool = False) -> jax.Array:
    """T transposed, in the rotated basis: int16 [..., out / 16, in / 16, 16 K] -> float16
    [..., out, in]."""
    *lead, outs, ins, _ = trellis.shape
    values = codebook_value(states(trellis), codebook)
    if as_e4m3:
        # Nearest even, saturating; float16 values here stay far below 448.
        values = jnp.clip(values, -448, 448).astype(jnp.float8_e4m3fn).astype(jnp.float16)
    tiles = values[..., _order()].reshape(*lead, outs, ins, TILE, TILE)
    return tiles.swapaxes(-3, -2).reshape(*lead, outs * TILE, ins * TILE)


def states(trellis: jax.Array) -> jax.Array:
    """int16 [..., 16 K] -> uint32 [..., 256]: the 16 bits behind each value of a tile.

    Words are little-endian pairs of int16; within the ring the most significant bit comes first.
    """
    halves = lax.bitcast_convert_type(jnp.asarray(trellis), jnp.uint16).astype(jnp.uint32)
    words = halves[..., 0::2] | halves[..., 1::2] << 16
    count = trellis.shape[-1]  # 16 K
    ring = 16 * count
    p = np.arange(256)
    # floor((p + 1) K), with K = count / 16 maybe a half integer.
    start = ((p + 1) * count // 16 - 16) % ring
    word, shift = start // 32, (start % 32).astype(np.uint32)
    high = words[..., word] << shift
    # Two shifts, since one by 32 is undefined.
    low = (words[..., (word + 1) % (ring // 32)] >> 1) >> (31 - shift)
    return (high | low) >> 16


def codebook_value(state: jax.Array, codebook: str) -> jax.Array:
    """uint32 states below 2^16 -> float16. All sums are exact in float32 before the rounding."""

    def half(bits: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.float16).astype(jnp.float32)

    if codebook == "mul1":
        x = state * np.uint32(MULTIPLIERS["mul1"])
        total = (x & 255) + (x >> 8 & 255) + (x >> 16 & 255) + (x >> 24)
        scale, offset = (
            float(np.array(b, np.uint16).view(np.float16)) for b in (0x1EEE, 0xC931)
        )
        value = (1024 + total).astype(jnp.float32) * np.float32(scale) + np.float32(offset)
        return value.astype(jnp.float16)
    if codebook == "mcg":
        x = state * np.uint32(MULTIPLIERS["mcg"])
    else:
        x = state * np.uint32(89226354) + np.uint32(64248484)
    x = (x & np.uint32(0x8FFF8FFF)) ^ np.uint32(0x3B603B60)
    return (half(x & 0xFFFF) + half(x >> 16)).astype(jnp.float16)


def hadamard() -> np.ndarray:
    """Sylvester's matrix of 128, entries +1 and -1."""
    h = np.ones((1, 1), np.float32)
    while len(h) < ROTATION:
        h = np.block([[h, h], [h, -h]])
    return h


def rotate(w: jax.Array, axis: int) -> jax.Array:
    """w times H along one of its last two axes."""
    blocks = w.swapaxes(axis, -1).reshape(*w.swapaxes(axis, -1).shape[:-1], -1, ROTATION)
    turned = jnp.matmul(blocks, jnp.asarray(hadamard()), precision=lax.Precision.HIGHEST)
    turned = turned * np.float32(ROTATION**-0.5)
    return turned.reshape(*turned.shape[:-2], -1).swapaxes(axis, -1)


def unpack_signs(words: np.ndarray) -> np.ndarray:
    """Older files: int16 [n / 16] sign bits -> float16 [n]; a set bit is -1, the lowest first."""
    set_bits = (words.view(np.uint16)[..., None] >> np.arange(16, dtype=np.uint16)) & 1
    return (1 - 2.0 * set_bits).reshape(*words.shape[:-1], -1).astype(np.float16)


def codebook_of(mcg: np.ndarray | None, mul1: np.ndarray | None) -> str:
    """The codebook that a file announces by the multiplier beside a trellis.

    Raises:
      CheckpointError: both, or a multiplier that is not the known one.
    """
    given = {k: v for k, v in (("mcg", mcg), ("mul1", mul1)) if v is not None}
    if len(given) > 1:
        raise CheckpointError("both mcg and mul1 are given; allowed: one")
    for name, value in given.items():
        multiplier = int(value.reshape(())) & 0xFFFFFFFF
        if multiplier != MULTIPLIERS[name]:
            raise CheckpointError(f"{name} is {multiplier:#x}; allowed: {MULTIPLIERS[name]:#x}")
        return name
    return "3inst"


def exl3_tensor(
    trellis: np.ndarray,
    in_scale: np.ndarray,
    out_scale: np.ndarray,
    codebook: str,
    *,
    as_e4m3: bool = False,
) -> Exl3Tensor:
    """A checked Exl3Tensor from the file's arrays (suh or unpacked su, svh or unpacked sv).

    Raises:
      CheckpointError: shapes that do not fit, or a bit rate that is no multiple of one half.
    """
    if trellis.ndim != 3 or trellis.dtype != np.int16:
        raise CheckpointError(f"a trellis of {trellis.dtype} {list(trellis.shape)}; allowed: int16, 3-D")
    ins, outs, count = trellis.shape
    check_rate(count, codebook)
    k, n = ins * TILE, outs * TILE
    if k % ROTATION or n % ROTATION:
        raise CheckpointError(f"a trellis of [{k}, {n}]; allowed: multiples of {ROTATION}")
    if in_scale.shape != (k,) or out_scale.shape != (n,):
        raise CheckpointError(
            f"scales are {list(in_scale.shape)} and {list(out_scale.shape)}; needed: [{k}], [{n}]"
        )
    return Exl3Tensor(trellis.swapaxes(0, 1), out_scale[:, None], in_scale[None, :], codebook, as_e4m3, n, k)


def check_rate(count: int, codebook: str) -> None:
    """Raises CheckpointError unless `count` int16 a tile are a rate that the codebook has."""
    if codebook not in CODEBOOKS:
        raise CheckpointError(f"codebook {codebook!r}; allowed: {', '.join(CODEBOOKS)}")
    if count % 8 or not 16 <= count <= 128:
        raise CheckpointError(f"{count / 16} bits a weight; allowed: 1 to 8 in steps of one half")
