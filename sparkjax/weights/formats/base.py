"""What every quantized format offers, so that operations need not know which one they hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROWS, COLS = -2, -1
"""The axes of a matrix that `pick` takes: outputs and inputs."""


Plane = Any
"""An array of a node: numpy's while loading, jax's afterwards."""


class QuantizedTensor:
    """A weight that stays in its published bytes. Formats are pytree nodes derived from this.

    A stacked tensor has leading axes (layers, experts) that index like those of an array; the
    last two axes of the logical shape are [N, K]: N outputs, K inputs. Every plane of a node has
    the same leading axes, then one axis that runs along N and one that runs along K (of size 1
    where the plane does not vary), so that one PartitionSpec of the logical matrix cuts every
    plane. A rank's share of each plane is a complete node of its own: no block, group or packed
    word lies across two shares.

    A format has static fields `rows` and `cols` (N and K of one share), and defines `_main` and
    `numbers`; `_rows` and `pick` where the general way is not good enough.
    """

    rows: int
    cols: int
    replace: Callable[..., Any]

    def _main(self) -> tuple[Plane, int, int, int]:
        """The largest plane, its axes behind the leading ones, and how many entries of the first
        two of those one share of `rows` x `cols` weights has."""
        raise NotImplementedError

    def numbers(self) -> jax.Array:
        """float32 [..., N, K] of a node that is one share."""
        raise NotImplementedError

    @property
    def lead(self) -> tuple[int, ...]:
        """Sizes of the leading axes."""
        plane, axes, _, _ = self._main()
        return tuple(plane.shape[: plane.ndim - axes])

    @property
    def shares(self) -> tuple[int, int]:
        """How many shares lie side by side along N and along K."""
        plane, axes, rows, cols = self._main()
        n, k = plane.shape[plane.ndim - axes :][:2]
        return n // max(rows, 1), k // max(cols, 1)

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape [..., N, K]."""
        n, k = self.shares
        return (*self.lead, n * self.rows, k * self.cols)

    @property
    def ndim(self) -> int:
        """Number of logical axes."""
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        """The dtype of the weights as numbers."""
        return jnp.dtype(jnp.float32)

    def at(self, layer: Any) -> Any:
        """The node at index `layer` (or tuple of indices; may be traced) of the leading axes."""
        return jax.tree.map(lambda plane: plane[layer], self)

    def dequantize(self, layer: Any = None, dtype: Any = jnp.float32) -> jax.Array:
        """All weights, or those at index `layer` of the leading axes, as numbers."""
        node = self if layer is None else self.at(layer)
        return node._all_shares().astype(dtype)

    def _all_shares(self) -> jax.Array:
        for axis, count in zip((ROWS, COLS), self.shares, strict=True):
            if count > 1:
                parts = [_share(self, axis, i, count)._all_shares() for i in range(count)]
                return jnp.concatenate(parts, axis)
        return self.numbers()

    def take_rows(self, ids: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
        """Rows of a 2-D tensor as numbers [*ids.shape, K]; ids out of range are clamped."""
        ids = jnp.clip(jnp.asarray(ids), 0, self.shape[ROWS] - 1)
        if self.shares != (1, 1):
            return self._all_shares()[ids].astype(dtype)
        return self._rows(ids.reshape(-1)).reshape(*ids.shape, self.cols).astype(dtype)

    def _rows(self, ids: jax.Array) -> jax.Array:
        """float32 [ids, K] of valid 1-D ids."""
        return self.numbers()[ids]

    def pick(
        self, axis: int, index: np.ndarray, parts: int = 1, only: int | None = None
    ) -> Any:
        """On the host: the node whose rows (or columns) are those at `index`, -1 for zeros.

        Args:
          axis: ROWS or COLS.
          index: int [parts * size].
          parts: shares that the result consists of, each of `size` rows (columns).
          only: the one share that is wanted, None for all side by side. It has the same block
            sizes either way, so that what the ranks hold goes together.
        """
        raise NotImplementedError


def _share(node: Any, axis: int, part: int, parts: int) -> Any:
    """One of the shares along an axis."""
    at = len(node.lead) + (axis == COLS)

    def cut(plane: jax.Array) -> jax.Array:
        size = plane.shape[at] // parts
        return plane[(slice(None),) * at + (slice(part * size, (part + 1) * size),)]

    return jax.tree.map(cut, node)
