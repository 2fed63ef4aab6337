"""Paged attention and writes into pages in C++ on the CPU.

The online softmax takes keys in chunks at absolute positions, so a query's result has the same
bits in any batch, at any tile size (Milakov & Gimelshein 2018; Dao et al. 2022). Nothing that a
query does not see is read into its result, so places never written may hold anything.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import native


def supports(q: Any, k: Any, v: Any) -> str | None:
    """None if `paged_attention` can take these, else the reason."""
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.dtype != jnp.float32:
            return f"{name} is {array.dtype}; float32 is supported"
    if q.ndim != 4 or k.ndim != 5 or v.ndim != 5 or k.shape[:4] != v.shape[:4]:
        return f"q, k and v of shapes {q.shape}, {k.shape}, {v.shape}"
    if q.shape[3] != k.shape[4] or q.shape[2] % k.shape[3]:
        return f"heads do not fit: q {q.shape}, k {k.shape}"
    return native.why_not()


def supports_write(plane: Any, rows: Any) -> str | None:
    """None if `paged_write` can take these, else the reason."""
    if plane.ndim < 3 or rows.ndim != plane.ndim - 1 or rows.shape[2:] != plane.shape[3:]:
        return f"plane and rows of shapes {plane.shape}, {rows.shape}"
    if plane.dtype.itemsize not in (1, 2, 4, 8):
        return f"a plane of {plane.dtype}"
    return native.why_not()


def _int32(a: Any) -> jax.Array:
    return jnp.asarray(a, jnp.int32)


def paged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    layer: Any,
    page_table: jax.Array,
    start: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Causal attention of each row's new tokens to the keys and values in its pages.

    Args:
      q: float32 [B, Q, Hq, D]; query i of row b is at position start[b] + i. Head h reads key
        head h // (Hq / Hk).
      k, v: float32 planes [L, P, S, Hk, D] and [L, P, S, Hk, Dv], all layers: P pages of S tokens,
        the new tokens' own rows written already.
      layer: int or int32 [], which layer of the planes (clamped).
      page_table: int32 [B, T]; position p of row b lies in page page_table[b, p // S].
      start: int32 [B].
      lengths: int32 [B]; queries at or past lengths[b] give zeros.
      scale: of q . k, before softcap.
      window: W > 0 hides keys at or before i - W from position i; 0 for none.
      softcap: c > 0 replaces a logit s by c tanh(s / c).
      sinks: None, or float32 [Hq]: one more logit a head that attends to nothing.

    Returns:
      float32 [B, Q, Hq, Dv].

    Raises:
      ValueError: other dtypes, or shapes that do not fit.
      RuntimeError: the native library is not there.
    """
    native.require()
    reason = supports(q, k, v)
    if reason is not None:
        raise ValueError(f"paged_attention: {reason}")
    shape = jax.ShapeDtypeStruct((*q.shape[:3], v.shape[4]), jnp.float32)
    return jax.ffi.ffi_call("sparkjax_paged_attention", shape)(
        q,
        k,
        v,
        _int32(layer),
        _int32(page_table),
        _int32(start),
        _int32(lengths),
        jnp.zeros(0, jnp.float32) if sinks is None else sinks.astype(jnp.float32),
        scale=np.float32(scale),
        softcap=np.float32(softcap),
        window=np.int64(window),
    )


def paged_write(
    plane: jax.Array,
    rows: jax.Array,
    layer: Any,
    page_table: jax.Array,
    start: jax.Array,
    lengths: jax.Array,
) -> jax.Array:
    """plane[layer, page_table[b, p // S], p % S] = rows[b, i] for p = start[b] + i, i < lengths[b].

    Args:
      plane: [L, P, S, ...]; written in place where it is donated or carried, else copied by XLA.
      rows: [B, Q, ...], cast to the plane's dtype.
      layer, page_table, start, lengths: as in `paged_attention`. Positions past the page table and
        pages outside the plane are dropped.

    Returns:
      The plane.

    Raises:
      ValueError: shapes that do not fit.
      RuntimeError: the native library is not there.
    """
    native.require()
    reason = supports_write(plane, rows)
    if reason is not None:
        raise ValueError(f"paged_write: {reason}")
    shape = jax.ShapeDtypeStruct(plane.shape, plane.dtype)
    call = jax.ffi.ffi_call("sparkjax_paged_write", shape, input_output_aliases={0: 0})
    return call(
        plane,
        rows.astype(plane.dtype),
        _int32(layer),
        _int32(page_table),
        _int32(start),
        _int32(lengths),
    )
