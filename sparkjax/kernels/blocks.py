"""Walking over queries a few at a time, so that no array is as large as queries x keys x heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

BUDGET = 1 << 24
"""Elements that the largest intermediate array of a reference kernel may have."""


def over_queries(function: Callable[..., Any], cost: int, *arrays: jax.Array) -> Any:
    """function(*arrays), some queries at a time.

    Args:
      function: of arrays [B, q, ...], for any q, to an array or tuple of arrays [B, q, ...]; what
        it returns for a query depends on that query only.
      cost: elements of the largest intermediate array for one query of every row.
      *arrays: [B, Q, ...].
    """
    count = arrays[0].shape[1]
    block = max(BUDGET // max(cost, 1), 1)
    if count <= block:
        return function(*arrays)
    blocks = -(-count // block)

    def cut(a: jax.Array) -> jax.Array:
        pad = [(0, 0), (0, blocks * block - count), *[(0, 0)] * (a.ndim - 2)]
        cells = jnp.pad(a, pad).reshape(a.shape[0], blocks, block, *a.shape[2:])
        return jnp.moveaxis(cells, 1, 0)

    def join(a: jax.Array) -> jax.Array:
        cells = jnp.moveaxis(a, 0, 1)
        return cells.reshape(cells.shape[0], blocks * block, *cells.shape[3:])[:, :count]

    out = jax.lax.map(lambda parts: function(*parts), tuple(cut(a) for a in arrays))
    return jax.tree.map(join, out)
