"""The jnp reference of sparse grouped-query attention (Qwen sparse attention)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..attention.reference import HIDDEN
from ..blocks import over_queries
from ..sparse_attention.reference import gather_rows


def sparse_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    layer: Any,
    pages: jax.Array,
    selected: jax.Array,
    *,
    scale: float,
) -> jax.Array:
    """softmax(scale q k^T) v over the chosen keys of each query, accumulated in float32.

    Queries are walked a few at a time: nothing as large as Q x K x heads is held.

    Args:
      q: [B, Q, Hq, D]; query head h reads key head h // (Hq / Hk).
      k, v: planes [L, P, S, Hk, D] and [L, P, S, Hk, Dv], all layers.
      layer: int or int32 [], which layer of the planes.
      pages: int32 [B, T], page tables.
      selected: int32 [B, Q, K], positions counted along each sequence, in any order; -1: none.

    Returns:
      [B, Q, Hq, Dv] in q's dtype; zeros where a query has no key.
    """
    b, _, heads, dim = q.shape
    kv_heads = k.shape[3]
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None

    def product(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.einsum(equation, x, y, precision=precision, preferred_element_type=jnp.float32)

    def block(q: jax.Array, index: jax.Array) -> jax.Array:
        mask = index >= 0

        def rows(plane: jax.Array) -> jax.Array:
            # A place that nothing was written to may hold anything, NaN too.
            found = gather_rows(plane, layer, pages, index)
            return jnp.where(mask[..., None, None], found, 0).astype(q.dtype)

        grouped = q.reshape(*q.shape[:2], kv_heads, heads // kv_heads, dim)
        logits = product("bqhgd,bqkhd->bqhgk", grouped, rows(k)) * scale
        seen = mask[:, :, None, None]
        logits = jnp.where(seen, logits, HIDDEN)
        # The maximum only scales numerator and denominator alike.
        top = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
        weights = jnp.where(seen, jnp.exp(logits - top), 0.0)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        p = (weights / jnp.where(total == 0, 1.0, total)).astype(q.dtype)
        out = product("bqhgk,bqkhd->bqhgd", p, rows(v))
        return out.reshape(*q.shape[:3], v.shape[-1]).astype(q.dtype)

    cost = b * selected.shape[-1] * (heads + kv_heads * (dim + v.shape[-1]))
    return over_queries(block, cost, q, selected)
