"""Choosing, for every query, the rows of a cache that its attention will read."""

from __future__ import annotations

from typing import Any

import jax

from ...mesh.context import Context
from ..dispatch import Implementation, choose
from . import reference, triton
from .reference import index_scores, top_rows

__all__ = ["index_scores", "select", "top_rows"]

IMPLEMENTATIONS = (Implementation("triton", "cuda", triton.supports, triton.select),)


def select(
    q: jax.Array,
    weights: jax.Array,
    plane: jax.Array,
    layer: Any,
    pages: jax.Array,
    limit: jax.Array,
    *,
    context: Context,
    k: int,
    scale: float,
) -> jax.Array:
    """int32 [B, Q, k]; arguments as in `reference.select`."""
    function = choose("indexer", context, reference.select, IMPLEMENTATIONS, q, plane)
    return function(q, weights, plane, layer, pages, limit, k=k, scale=scale)
