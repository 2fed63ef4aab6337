"""EXLR8 v2: EXL3's trellis with values rounded to E4M3, in halves of 128 channels.

A half is 128 channels of an expert's intermediate axis. Its wide side (the hidden axis) shares one
sign vector per layer and has a scale per 128 values; the 128 channels have a vector of their own.
Every half is stored at several bit rates and a manifest picks one, so halves of one matrix may
differ: `Halves` keeps each as it is. Source: the format's public reference loader.

    gate, up:  W[in, 128] = diag(signs * block) H T H diag(chan), tiles [in / 16][8]
    down:      W[128, out] = diag(chan) H T H diag(signs * block), tiles [out / 128][8][8]
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ..errors import CheckpointError
from .base import COLS, ROWS, QuantizedTensor
from .exl3 import ROTATION, TILE, Exl3Tensor, check_rate, exl3_tensor

CODEBOOK = "mcg"


def exlr8_half(
    raw: np.ndarray, chan: np.ndarray, block: np.ndarray, signs: np.ndarray, part: str
) -> Exl3Tensor:
    """One half as a matrix [N, K].

    Args:
      raw: uint8 tiles, as read.
      chan: float16 [128].
      block: float16 [wide / 128].
      signs: int8 [wide].
      part: which side the 128 channels are: "out" (gate, up) or "in" (down).

    Raises:
      CheckpointError: sizes that do not fit.
    """
    wide = len(signs)
    if part not in ("in", "out"):
        raise CheckpointError(f"part is {part!r}; allowed: 'in', 'out'")
    tiles = wide // TILE * (ROTATION // TILE)
    if chan.shape != (ROTATION,) or block.shape != (wide // ROTATION,) or wide % ROTATION:
        raise CheckpointError(
            f"a half with vectors of {chan.size}, {block.size} and {wide}; needed: 128, n, 128 n"
        )
    if raw.size % (2 * tiles):
        raise CheckpointError(f"{raw.size} bytes are no whole number for each of {tiles} tiles")
    coded = np.ascontiguousarray(raw.reshape(-1)).view(np.int16)
    per, rate = ROTATION // TILE, coded.size // tiles
    check_rate(rate, CODEBOOK)
    # A sign times a float16 is exact.
    scale = (signs.astype(np.float32) * np.repeat(block.astype(np.float32), ROTATION)).astype(
        np.float16
    )
    if part == "out":
        trellis = coded.reshape(wide // TILE, per, rate)
        return exl3_tensor(trellis, scale, chan, CODEBOOK, as_e4m3=True)
    blocks = coded.reshape(wide // ROTATION, per, per, rate).swapaxes(0, 1)
    trellis = blocks.reshape(per, wide // TILE, rate)
    return exl3_tensor(trellis, chan, scale, CODEBOOK, as_e4m3=True)


@struct.dataclass
class Halves(QuantizedTensor):
    """Matrices side by side along one axis, each in its own format (or bit rate).

    Attributes:
      parts: QuantizedTensors with equal leading axes.
      axis: ROWS or COLS.
    """

    parts: tuple[Any, ...]
    axis: int = struct.field(pytree_node=False)

    @property
    def lead(self) -> tuple[int, ...]:
        """Sizes of the leading axes."""
        return self.parts[0].lead

    @property
    def shares(self) -> tuple[int, int]:
        """How many shares lie side by side; of these, always one."""
        return 1, 1

    @property
    def rows(self) -> int:  # type: ignore[override]
        """N."""
        sizes = [p.shape[ROWS] for p in self.parts]
        return sum(sizes) if self.axis == ROWS else sizes[0]

    @property
    def cols(self) -> int:  # type: ignore[override]
        """K."""
        sizes = [p.shape[COLS] for p in self.parts]
        return sum(sizes) if self.axis == COLS else sizes[0]

    def numbers(self) -> jax.Array:
        """float32 [..., N, K]."""
        return jnp.concatenate([p.numbers() for p in self.parts], self.axis)

    def pick(
        self, axis: int, index: np.ndarray, parts: int = 1, only: int | None = None
    ) -> Any:
        """See `QuantizedTensor.pick`.

        Raises:
          CheckpointError: several shares, or rows (columns) across parts along their own axis.
        """
        if parts > 1:
            raise CheckpointError("halves of several bit rates cannot be spread over ranks together")
        if axis != self.axis:
            return self.replace(parts=tuple(p.pick(axis, index) for p in self.parts))
        ends = np.cumsum([p.shape[axis] for p in self.parts])
        owner = np.where(index < 0, -1, np.searchsorted(ends, index, side="right"))
        # Runs of one owner, in order; padding joins the run before it.
        for i in range(len(owner)):
            if owner[i] < 0:
                owner[i] = owner[i - 1] if i else 0
        cuts = np.flatnonzero(np.diff(owner)) + 1
        runs = zip(np.split(index, cuts), np.split(owner, cuts), strict=True)
        found = []
        for run, who in runs:
            part = self.parts[who[0]]
            start = ends[who[0]] - part.shape[axis]
            found.append(part.pick(axis, np.where(run < 0, -1, run - start)))
        return found[0] if len(found) == 1 else self.replace(parts=tuple(found))
