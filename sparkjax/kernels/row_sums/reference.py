"""Sums over a vocabulary whose order of additions does not depend on the number of rows."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax


def row_sum(term: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    """Sums term(*arrays) over V in an order that depends on V alone: [B, ...].

    The order of a library reduction may change with B. Here every addition is written out: 64
    slices at a time as a tree, which also keeps the rounding error to the depth of the tree. The
    barriers keep the compiler from fusing the levels into one enormous expression.

    Args:
      term: elementwise; maps slices [B, W] of the arrays to [B, W, ...]. It is applied slice by
        slice, so that its result never exists as a whole. Zeros must give zero: they pad V.
      arrays: [B, V] each.
    """
    x = _level(term, *arrays)
    while x.shape[1] > 1:
        x = _level(lambda x: x, x)
    return x[:, 0]


def _level(term: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    total = arrays[0].shape[1]
    fan = min(64, 1 << (total - 1).bit_length())
    width = -(-total // fan)
    pad = (0, width * fan - total)
    arrays = tuple(jnp.pad(x, [(0, 0), pad] + [(0, 0)] * (x.ndim - 2)) for x in arrays)
    parts = [term(*(x[:, i * width : (i + 1) * width] for x in arrays)) for i in range(fan)]
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return lax.optimization_barrier(parts[0])


def upto(keys: jax.Array, weights: jax.Array | None, edges: jax.Array) -> jax.Array:
    """The sum of the weights at keys of at most each edge.

    Args:
      keys: int32 [B, V], none negative.
      weights: float32 [B, V]; None counts the keys.
      edges: int32 [B, E], each at least -1.

    Returns:
      [B, E], float32, or int32 where keys are counted.
    """
    if weights is None:
        weights = jnp.ones_like(keys)

    def term(k: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.where(k[:, :, None] <= edges[:, None, :], w[:, :, None], 0)

    return row_sum(term, keys, weights)
