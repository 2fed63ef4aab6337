"""The jnp reference of grouped-query attention (Vaswani et al. 2017, Ainslie et al. 2023)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

# Finite, so that a row that sees nothing (a closed one) gives zeros and not NaN.
HIDDEN = -1e30


def positions_of(start: jax.Array, count: int) -> jax.Array:
    """int32 [B, count]: start[b] + 0 .. count - 1."""
    return start[:, None] + jnp.arange(count, dtype=jnp.int32)


def visible(query: jax.Array, key: jax.Array, window: int = 0) -> jax.Array:
    """bool [B, Q, K]: key positions [B, K] that query positions [B, Q] see: those at or before
    it, with a window W only the last W (itself included)."""
    seen = (key[:, None, :] <= query[:, :, None]) & (key[:, None, :] >= 0)
    if window:
        seen &= key[:, None, :] > query[:, :, None] - window
    return seen


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    seen: jax.Array,
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """softmax(scale q k^T) v over the visible keys, accumulated in float32.

    Args:
      q: [B, Q, Hq, D]; query head h reads key head h // (Hq / Hk).
      k, v: [B, K, Hk, D], [B, K, Hk, Dv].
      seen: bool [B, Q, K].
      softcap: c > 0 replaces a logit s by c tanh(s / c).
      sinks: None, or float32 [Hq]: one more logit a head that attends to nothing.

    Returns:
      [B, Q, Hq, Dv] in q's dtype; zeros where a query sees no key.
    """
    b, n, heads, dim = q.shape
    kv_heads = k.shape[2]
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    grouped = q.reshape(b, n, kv_heads, heads // kv_heads, dim)
    logits = jnp.einsum(
        "bqhgd,bkhd->bhgqk",
        grouped,
        k.astype(q.dtype),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    logits = logits * scale
    if softcap:
        logits = softcap * jnp.tanh(logits / softcap)
    mask = seen[:, None, None]
    logits = jnp.where(mask, logits, HIDDEN)
    top = jnp.max(logits, axis=-1, keepdims=True)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(1, kv_heads, heads // kv_heads, 1, 1)
        top = jnp.maximum(top, sink)
    # jax.lax.stop_gradient: the maximum only scales numerator and denominator alike.
    top = jax.lax.stop_gradient(top)
    weights = jnp.where(mask, jnp.exp(logits - top), 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sink - top)
    probabilities = weights / jnp.where(total == 0, 1.0, total)
    # A place that nothing was written to may hold anything, NaN too.
    values = jnp.where(seen.any(axis=1)[:, :, None, None], v, 0).astype(q.dtype)
    out = jnp.einsum(
        "bhgqk,bkhd->bqhgd",
        probabilities.astype(q.dtype),
        values,
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    return out.reshape(b, n, heads, v.shape[-1]).astype(q.dtype)


def paged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    layer: Any,
    pages: jax.Array,
    start: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attention of each row's new tokens to the keys and values in its pages.

    Args:
      q: [B, Q, Hq, D], the queries at positions start[b] + 0 .. Q - 1.
      k, v: planes [L, P, S, Hk, D] and [L, P, S, Hk, Dv], all layers, with the new tokens' rows
        already written.
      layer: int or int32 [], which layer of the planes.
      pages: int32 [B, T], page tables.
      start, lengths: int32 [B]; queries at or past lengths[b] give zeros.
      scale, window, softcap, sinks: as in `attend` and `visible`.

    Returns:
      [B, Q, Hq, Dv] in q's dtype.
    """
    b, t = pages.shape
    size = k.shape[2]
    keys = k[layer, pages].reshape(b, t * size, *k.shape[3:])
    values = v[layer, pages].reshape(b, t * size, *v.shape[3:])
    query = positions_of(start, q.shape[1])
    key = jnp.broadcast_to(jnp.arange(t * size, dtype=jnp.int32), (b, t * size))
    real = query < (start + lengths)[:, None]
    seen = visible(query, key, window) & real[:, :, None]
    return attend(q, keys, values, seen, scale=scale, softcap=softcap, sinks=sinks)


def ring_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    ring_k: jax.Array,
    ring_v: jax.Array,
    ring_positions: jax.Array,
    start: jax.Array,
    lengths: jax.Array,
    *,
    window: int,
    scale: float,
    softcap: float = 0.0,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Sliding-window attention of each row's new tokens to its ring and to one another.

    Args:
      q, k, v: [B, Q, Hq, D], [B, Q, Hk, D], [B, Q, Hk, Dv], the new tokens.
      ring_k, ring_v: [B, R, Hk, D], [B, R, Hk, Dv], as they were before the new tokens.
      ring_positions: int32 [B, R], the position at each place of the ring (negative: nothing).
      start, lengths: int32 [B].
      window: W, the keys that a query sees, itself included; R must be at least W - 1.

    Returns:
      [B, Q, Hq, Dv] in q's dtype.
    """
    if ring_k.shape[1] < window - 1:
        raise ValueError(
            f"a window of {window} needs {window - 1} rows, the ring has {ring_k.shape[1]}"
        )
    query = positions_of(start, q.shape[1])
    real = query < (start + lengths)[:, None]
    key = jnp.concatenate([ring_positions, jnp.where(real, query, -1)], axis=1)
    seen = visible(query, key, window) & real[:, :, None]
    keys = jnp.concatenate([ring_k.astype(k.dtype), k], axis=1)
    values = jnp.concatenate([ring_v.astype(v.dtype), v], axis=1)
    return attend(q, keys, values, seen, scale=scale, softcap=softcap, sinks=sinks)


def ring_attention_cached(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    ring_k: jax.Array,
    ring_v: jax.Array,
    layer: Any,
    slots: jax.Array,
    start: jax.Array,
    lengths: jax.Array,
    *,
    window: int,
    scale: float,
    softcap: float = 0.0,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """`ring_attention` to rings that lie in planes.

    Args:
      q, k, v: [B, Q, Hq, D], [B, Q, Hk, D], [B, Q, Hk, Dv], the new tokens.
      ring_k, ring_v: [L, slots, R, Hk, D] and [L, slots, R, Hk, Dv] without the new tokens;
        position p of a sequence lies at place p % R of its slot.
      layer: int or int32 [], which layer of the planes.
      slots, start, lengths: int32 [B].

    Returns:
      [B, Q, Hq, Dv] in q's dtype.
    """
    size = ring_k.shape[2]
    newest = start[:, None] - 1
    positions = newest - (newest - jnp.arange(size, dtype=jnp.int32)) % size
    rings = ring_k[layer, slots], ring_v[layer, slots]
    return ring_attention(
        q, k, v, *rings, positions, start, lengths,
        window=window, scale=scale, softcap=softcap, sinks=sinks,
    )  # fmt: skip


def paged_write(
    plane: jax.Array,
    rows: jax.Array,
    layer: Any,
    pages: jax.Array,
    start: jax.Array,
    lengths: jax.Array,
) -> jax.Array:
    """plane[layer, pages[b, p // S], p % S] = rows[b, i] for p = start[b] + i, i < lengths[b].

    Args:
      plane: [L, P, S, ...]; stays whole, written in place when donated or carried.
      rows: [B, Q, ...], cast to the plane's dtype.
      pages, start, lengths: as in `paged_attention`.
    """
    size = plane.shape[2]
    position = positions_of(start, rows.shape[1])
    real = position < (start + lengths)[:, None]
    page = jnp.take_along_axis(pages, jnp.minimum(position // size, pages.shape[1] - 1), axis=1)
    page = jnp.where(real, page, plane.shape[1])
    return plane.at[layer, page, position % size].set(rows.astype(plane.dtype), mode="drop")
