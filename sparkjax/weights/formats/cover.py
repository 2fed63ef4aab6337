"""Rows or columns of a format whose blocks cannot be cut: whole blocks and an index into them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from . import gather
from .base import COLS, ROWS, Plane, QuantizedTensor


@struct.dataclass
class Covered(QuantizedTensor):
    """Elements of `inner` along one axis.

    Attributes:
      inner: whole blocks that have all the elements.
      index: int32, [..., N, 1] or [..., 1, K]: places in a share of `inner`, -1 for zeros.
      axis: ROWS or COLS.
      block: rows or columns of a block of `inner`.
    """

    inner: Any
    index: Plane
    axis: int = struct.field(pytree_node=False)
    block: int = struct.field(pytree_node=False)
    rows: int = struct.field(pytree_node=False)
    cols: int = struct.field(pytree_node=False)

    def _main(self) -> tuple[jax.Array, int, int, int]:
        return (self.index, 2, *((self.rows, 1) if self.axis == ROWS else (1, self.cols)))

    def numbers(self) -> jax.Array:
        """float32 [..., N, K]."""
        whole = self.inner.numbers()
        at = jnp.broadcast_to(self.index, (*self.lead, self.rows, self.cols))
        return jnp.where(at < 0, 0.0, jnp.take_along_axis(whole, jnp.maximum(at, 0), self.axis))

    def pick(
        self, axis: int, index: np.ndarray, parts: int = 1, only: int | None = None
    ) -> Covered:
        """See `QuantizedTensor.pick`."""
        if gather.is_identity(index, self.shape[axis], parts):
            return self
        size = len(index) // parts
        if axis != self.axis:
            inner = self.inner.pick(axis, index, parts, only)
            _, parts = gather.own(index, parts, only)
            places = gather.copies(np.asarray(self.index), axis, parts)
        else:
            places = np.where(index < 0, -1, np.asarray(self.index).reshape(-1)[index])
            return covered(self.inner, axis, places, parts, self.block, only)
        if axis == ROWS:
            return self.replace(inner=inner, index=places, rows=size)
        return self.replace(inner=inner, index=places, cols=size)


def covered(
    node: Any, axis: int, index: np.ndarray, parts: int, block: int, only: int | None = None
) -> Any:
    """Rows or columns of an unstacked node: its blocks alone where whole blocks are asked for.

    Args:
      block: rows or columns of a block of `node.pick_blocks`.
      only: the one share that is wanted; None is all of them.
    """
    index = np.asarray(index)
    size = len(index) // parts
    wanted, places = [], []
    for part in index.reshape(parts, size):
        blocks = np.unique(part[part >= 0] // block)
        wanted.append(blocks)
        place = np.searchsorted(blocks, part // block) * block + part % block
        places.append(np.where(part < 0, -1, place))
    # Every share has equally many blocks, one at least; the first one fills up.
    most = max(1, *(len(b) for b in wanted))
    plain = all(np.array_equal(p, np.arange(most * block)) for p in places)
    if only is not None:
        wanted, places, parts = [wanted[only]], [places[only]], 1
    filled = np.concatenate([np.pad(b, (0, most - len(b)), mode="constant") for b in wanted])
    inner = node.pick_blocks(axis, filled, parts)
    if plain:
        return inner
    at = np.concatenate(places).astype(np.int32)
    if axis == ROWS:
        return Covered(inner, at[:, None], ROWS, block, size, inner.cols)
    return Covered(inner, at[None, :], COLS, block, inner.shape[ROWS] // inner.shares[0], size)
