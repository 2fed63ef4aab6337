"""The jnp reference of attention over latent rows (DeepSeek-V2's multi-head latent attention with
the value projection absorbed, DeepSeek-V3.2's sparse attention, DeepSeek-V4's shared key-values).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..blocks import over_queries

# Finite, so that a row that sees nothing (a closed one) gives zeros and not NaN.
HIDDEN = -1e30


def gather_rows(plane: jax.Array, layer: Any, pages: jax.Array, index: jax.Array) -> jax.Array:
    """Rows `index` (int32 [B, ...], counted along each sequence) of plane [L, P, S, D]: [B, ..., D].

    A negative index gives an arbitrary row.
    """
    size = plane.shape[2]
    flat = jnp.maximum(index.reshape(index.shape[0], -1), 0)
    page = jnp.take_along_axis(pages, jnp.minimum(flat // size, pages.shape[1] - 1), axis=1)
    found = plane[layer, page, flat % size]
    return found.reshape(*index.shape, *plane.shape[3:])


def latent_attention(
    q: jax.Array,
    *,
    scale: float,
    value_dim: int,
    rows: jax.Array | None = None,
    seen: jax.Array | None = None,
    plane: jax.Array | None = None,
    layer: Any = None,
    pages: jax.Array | None = None,
    selected: jax.Array | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """softmax(scale q r^T) r[:value_dim] over the rows r that a query sees, one softmax over both
    kinds of rows, accumulated in float32:

    * `rows` [B, N, D], shared by a sequence's queries, with `seen` bool [B, Q, N];
    * rows of `plane` [L, P, S, D] that each query picked: `selected` int32 [B, Q, K], counted
      along the sequence (-1: none), gathered through the page tables `pages` [B, T].

    Queries are walked a few at a time: nothing as large as Q x K x D is held.

    Args:
      q: [B, Q, heads, D].
      value_dim: how many leading channels of a row are its value.
      sinks: None, or float32 [heads]: one more logit a head that attends to nothing.

    Returns:
      [B, Q, heads, value_dim] in q's dtype; zeros where a query sees nothing.
    """
    batch, _, heads, dim = q.shape
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None

    def product(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(equation, a, b, precision=precision, preferred_element_type=jnp.float32)

    if rows is not None and seen is not None:
        # A place that nothing was written to may hold anything, NaN too.
        rows = jnp.where(seen.any(axis=1)[:, :, None], rows, 0).astype(q.dtype)

    def block(q: jax.Array, *given: jax.Array) -> jax.Array:
        left = list(given)
        masks, logits = [], []
        if rows is not None:
            masks.append(left.pop(0)[:, :, None])
            logits.append(product("bqhd,bkd->bqhk", q, rows))
        own = None
        if plane is not None and pages is not None and left:
            index = left.pop(0)
            mask = index >= 0
            own = jnp.where(mask[..., None], gather_rows(plane, layer, pages, index), 0)
            own = own.astype(q.dtype)
            masks.append(mask[:, :, None])
            logits.append(product("bqhd,bqkd->bqhk", q, own))
        mask, logit = jnp.concatenate(masks, -1), jnp.concatenate(logits, -1) * scale
        logit = jnp.where(mask, logit, HIDDEN)
        top = jnp.max(logit, axis=-1, keepdims=True)
        if sinks is not None:
            sink = sinks.astype(jnp.float32)[:, None]
            top = jnp.maximum(top, sink)
        # The maximum only scales numerator and denominator alike.
        top = jax.lax.stop_gradient(top)
        weights = jnp.where(mask, jnp.exp(logit - top), 0.0)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        if sinks is not None:
            total = total + jnp.exp(sink - top)
        p = (weights / jnp.where(total == 0, 1.0, total)).astype(q.dtype)
        cut = 0 if rows is None else rows.shape[1]
        out = jnp.zeros((), jnp.float32)
        if rows is not None:
            out = out + product("bqhk,bkd->bqhd", p[..., :cut], rows[..., :value_dim])
        if own is not None:
            out = out + product("bqhk,bqkd->bqhd", p[..., cut:], own[..., :value_dim])
        return out.astype(q.dtype)

    parts = [part for part in (seen, selected) if part is not None]
    count = (0 if rows is None else rows.shape[1]) * heads
    if selected is not None:
        count += selected.shape[-1] * (heads + dim)
    return over_queries(block, batch * count, q, *parts)
