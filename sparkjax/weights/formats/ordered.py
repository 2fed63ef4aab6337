"""Inputs in the order of their groups (GPTQ's desc_act, compressed-tensors' actorder).

Where `groups` (g_idx) says anything but k // group, neighbouring inputs have unrelated scales. Once a
weight is on its way to a device its inputs are sorted by group, stably, codes and all: the same numbers,
with the order beside them. What is multiplied by it takes its inputs in that order.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from . import bits, gather
from .base import COLS, ROWS, Plane, QuantizedTensor
from .gptq import GptqTensor
from .packed import PackedTensor


@struct.dataclass
class Ordered(QuantizedTensor):
    """A weight whose column j is input order[j] of the one that it stands for.

    Attributes:
      inner: the weight with its inputs sorted.
      order: int32 [..., 1, K].
    """

    inner: Any
    order: Plane

    def _main(self) -> tuple[jax.Array, int, int, int]:
        return self.inner._main()

    @property
    def rows(self) -> int:  # type: ignore[override]
        """N."""
        return self.inner.rows

    @property
    def cols(self) -> int:  # type: ignore[override]
        """K."""
        return self.inner.cols

    def numbers(self) -> jax.Array:
        """float32 [..., N, K]."""
        return _unsorted(self.inner.numbers(), self.order)

    def _rows(self, ids: jax.Array) -> jax.Array:
        return _unsorted(self.inner._rows(ids), self.order)

    def pick(self, axis: int, index: np.ndarray, parts: int = 1, only: int | None = None) -> Any:
        """See `QuantizedTensor.pick`."""
        order = np.asarray(self.order)
        if axis == COLS:
            place = np.argsort(order.reshape(-1))
            return self.inner.pick(COLS, np.where(index < 0, -1, place[index]), parts, only)
        inner = self.inner.pick(ROWS, index, parts, only)
        return Ordered(inner, gather.copies(order, ROWS, gather.own(index, parts, only)[1]))


def _unsorted(numbers: jax.Array, order: Plane) -> jax.Array:
    place = jnp.broadcast_to(jnp.argsort(order, axis=-1), numbers.shape)
    return jnp.take_along_axis(numbers, place, axis=-1)


def in_order(node: Any) -> Any:
    """On the host: a matrix with its inputs sorted by group, where all groups have equally many; other
    weights as they are."""
    if not isinstance(node, (GptqTensor, PackedTensor)) or node.groups is None or node.lead:
        return node
    groups = np.asarray(node.groups).reshape(-1)
    count = node.scale.shape[-1]
    size = node.cols // count
    if (np.bincount(groups, minlength=count) != size).any():
        return node
    order = np.argsort(groups, kind="stable").astype(np.int32)
    packed = np.asarray(node.packed)
    if isinstance(node, GptqTensor):
        fields = node._fields(packed, node.cols)
        zero = node.zero
        if node.planar:
            zero = bits.pack(node._fields(np.asarray(zero).swapaxes(-1, -2), node.rows), node.width)
            node = node.replace(planar=False, zero=zero.swapaxes(-1, -2))
    else:
        fields = bits.unpack(packed, node.width, node.cols)
    words = bits.pack(fields[..., order], node.width)
    return Ordered(node.replace(packed=words, groups=None, group=size), order[None])
