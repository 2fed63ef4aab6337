"""Sums along rows in an order that the row's length alone decides, as choosing tokens needs them."""

from __future__ import annotations

import jax

from ...mesh.context import Context
from ..dispatch import Implementation, choose
from . import reference, triton
from .reference import row_sum

__all__ = ["row_sum", "upto"]

IMPLEMENTATIONS = (Implementation("triton", "cuda", triton.supports, triton.upto),)


def upto(
    keys: jax.Array, weights: jax.Array | None, edges: jax.Array, *, context: Context
) -> jax.Array:
    """[B, E]: the sum of the weights at keys of at most each edge; arguments as in
    `reference.upto`."""
    function = choose("row_sums", context, reference.upto, IMPLEMENTATIONS, keys, edges)
    return function(keys, weights, edges)
