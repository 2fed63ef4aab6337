"""The jnp reference of the two-level indexer (DeepSeek-V4.1)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..blocks import over_queries
from ..indexer.reference import index_scores, top_rows
from ..sparse_attention.reference import gather_rows


def pick_blocks(
    q: jax.Array,
    weights: jax.Array,
    plane: jax.Array,
    layer: Any,
    pages: jax.Array,
    limit: jax.Array,
    *,
    k: int,
    size: int,
    scale: float,
) -> jax.Array:
    """The k best blocks of `size` rows for each query, by the best score of a seen row:

        score_c = max_{j in block c, j < limit} sum_h weights_h relu(scale q_h . key_j)

    The block of the newest seen row is always among them. A tie goes to the lower block.

    Args:
      q: [B, Q, heads, D]; weights: [B, Q, heads].
      plane: [L, P, S, D], keys through the page tables `pages` [B, T].
      limit: int32 [B, Q]: only rows below it are seen.
      k: at most the number of blocks, ceil(T * S / size).

    Returns:
      int32 [B, Q, k], rising, -1 where fewer are seen; not differentiable.
    """
    b, t = pages.shape
    keys = plane[layer, pages].reshape(b, t * plane.shape[2], plane.shape[-1])
    q, weights, keys = jax.lax.stop_gradient((q, weights, keys))
    count = -(-keys.shape[1] // size)

    def block(q: jax.Array, weights: jax.Array, limit: jax.Array) -> jax.Array:
        scores = index_scores(q, keys, weights, scale)
        scores = jnp.where(jnp.arange(keys.shape[1]) < limit[..., None], scores, -jnp.inf)
        pad = [(0, 0), (0, 0), (0, count * size - keys.shape[1])]
        scores = jnp.pad(scores, pad, constant_values=-jnp.inf)
        best = scores.reshape(*scores.shape[:2], count, size).max(-1)
        number, end = jnp.arange(count), limit[..., None]
        newest = number == (end - 1) // size
        return top_rows(jnp.where(newest, jnp.inf, best), number * size < end, k)

    return over_queries(block, b * keys.shape[1] * q.shape[2], q, weights, limit)


def select_within(
    q: jax.Array,
    weights: jax.Array,
    plane: jax.Array,
    layer: Any,
    pages: jax.Array,
    limit: jax.Array,
    blocks: jax.Array,
    *,
    k: int,
    size: int,
    scale: float,
) -> jax.Array:
    """As `indexer.select`, among the rows of each query's `blocks` only (of `size` rows; int32
    [B, Q, n], rising, -1: none). Only their keys are read."""
    q, weights, plane = jax.lax.stop_gradient((q, weights, plane))
    rows = blocks.shape[-1] * size

    def block(
        q: jax.Array, weights: jax.Array, limit: jax.Array, blocks: jax.Array
    ) -> jax.Array:
        b, n = blocks.shape[:2]
        inside = jnp.arange(size, dtype=jnp.int32)
        index = jnp.where(blocks[..., None] < 0, -1, blocks[..., None] * size + inside)
        index = index.reshape(b, n, rows)
        keys = gather_rows(plane, layer, pages, index)
        # Every query has keys of its own: one sequence each.
        scores = index_scores(
            q.reshape(b * n, 1, *q.shape[2:]),
            keys.reshape(b * n, rows, -1),
            weights.reshape(b * n, 1, -1),
            scale,
        ).reshape(b, n, rows)
        best = top_rows(scores, (index >= 0) & (index < limit[..., None]), min(k, rows))
        chosen = jnp.take_along_axis(index, jnp.maximum(best, 0), axis=-1)
        chosen = jnp.where(best < 0, -1, chosen)
        return jnp.pad(chosen, [(0, 0), (0, 0), (0, k - best.shape[-1])], constant_values=-1)

    cost = q.shape[0] * rows * (q.shape[2] + q.shape[3])
    return over_queries(block, cost, q, weights, limit, blocks)
