"""The jnp reference of the lightning indexer (DeepSeek-V3.2, 2025)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..blocks import over_queries


def index_scores(q: jax.Array, keys: jax.Array, weights: jax.Array, scale: float) -> jax.Array:
    """score[b, i, j] = sum_h weights[b, i, h] relu(scale q[b, i, h] . keys[b, j]), in float32.

    Args:
      q: [B, Q, heads, D]; keys: [B, N, D]; weights: [B, Q, heads].

    Returns:
      float32 [B, Q, N].
    """
    high = jax.lax.Precision.HIGHEST
    products = jnp.einsum(
        "bqhd,bnd->bqhn", q.astype(jnp.float32), keys.astype(jnp.float32), precision=high
    )
    return jnp.einsum(
        "bqh,bqhn->bqn",
        weights.astype(jnp.float32),
        jax.nn.relu(products * scale),
        precision=high,
    )


def top_rows(scores: jax.Array, seen: jax.Array, k: int) -> jax.Array:
    """int32 [..., k]: the k best seen entries, in rising order of their index, then -1.

    A tie goes to the lower index.
    """
    # Zero has two signs, and a sort tells them apart.
    scores = jnp.where(seen, jnp.where(scores == 0, 0.0, scores), -jnp.inf)
    best, index = jax.lax.top_k(scores, k)
    last = jnp.iinfo(jnp.int32).max
    index = jnp.sort(jnp.where(best > -jnp.inf, index.astype(jnp.int32), last), axis=-1)
    return jnp.where(index == last, -1, index)


def select(
    q: jax.Array,
    weights: jax.Array,
    plane: jax.Array,
    layer: Any,
    pages: jax.Array,
    limit: jax.Array,
    *,
    k: int,
    scale: float,
) -> jax.Array:
    """The k best rows of each sequence's cache for each of its queries.

    Queries are walked a few at a time: nothing as large as Q x N x heads is held.

    Args:
      q: [B, Q, heads, D]; weights: [B, Q, heads].
      plane: [L, P, S, D], keys through the page tables `pages` [B, T].
      limit: int32 [B, Q]: only rows below it are seen.
      k: at most T * S.

    Returns:
      int32 [B, Q, k], rising, -1 where fewer are seen; not differentiable.
    """
    b, t = pages.shape
    keys = plane[layer, pages].reshape(b, t * plane.shape[2], plane.shape[-1])
    q, weights, keys = jax.lax.stop_gradient((q, weights, keys))

    def block(q: jax.Array, weights: jax.Array, limit: jax.Array) -> jax.Array:
        seen = jnp.arange(keys.shape[1]) < limit[..., None]
        return top_rows(index_scores(q, keys, weights, scale), seen, k)

    return over_queries(block, b * keys.shape[1] * q.shape[2], q, weights, limit)
