"""A coarse choice of blocks of cached rows, and an indexer that looks only inside them."""

from __future__ import annotations

from typing import Any

import jax

from ...mesh.context import Context
from ..dispatch import Implementation, choose
from . import reference, triton

__all__ = ["pick_blocks", "select_within"]

BLOCK_IMPLEMENTATIONS = (Implementation("triton", "cuda", triton.supports, triton.pick_blocks),)
WITHIN_IMPLEMENTATIONS = (Implementation("triton", "cuda", triton.supports, triton.select_within),)


def pick_blocks(
    q: jax.Array,
    weights: jax.Array,
    plane: jax.Array,
    layer: Any,
    pages: jax.Array,
    limit: jax.Array,
    *,
    context: Context,
    k: int,
    size: int,
    scale: float,
) -> jax.Array:
    """int32 [B, Q, k]; arguments as in `reference.pick_blocks`."""
    function = choose("candidates", context, reference.pick_blocks, BLOCK_IMPLEMENTATIONS, q, plane)
    return function(q, weights, plane, layer, pages, limit, k=k, size=size, scale=scale)


def select_within(
    q: jax.Array,
    weights: jax.Array,
    plane: jax.Array,
    layer: Any,
    pages: jax.Array,
    limit: jax.Array,
    blocks: jax.Array,
    *,
    context: Context,
    k: int,
    size: int,
    scale: float,
) -> jax.Array:
    """int32 [B, Q, k]; arguments as in `reference.select_within`."""
    function = choose(
        "candidates", context, reference.select_within, WITHIN_IMPLEMENTATIONS, q, plane
    )
    return function(q, weights, plane, layer, pages, limit, blocks, k=k, size=size, scale=scale)
