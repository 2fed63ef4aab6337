"""Grouped-query attention over paged keys and values, and over rings (sliding windows)."""

from __future__ import annotations

from typing import Any

import jax

from ...mesh.context import Context
from ..dispatch import Implementation, choose
from . import native as native
from . import reference, triton

__all__ = ["paged_attention", "paged_write", "ring_attention"]

IMPLEMENTATIONS = (
    Implementation("native", "cpu", native.supports, native.paged_attention),
    Implementation("triton", "cuda", triton.supports, triton.paged_attention),
)
RING_IMPLEMENTATIONS = (Implementation("triton", "cuda", triton.supports, triton.ring_attention),)
WRITE_IMPLEMENTATIONS = (
    Implementation("native", "cpu", native.supports_write, native.paged_write),
)


def paged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    layer: Any,
    pages: jax.Array,
    start: jax.Array,
    lengths: jax.Array,
    *,
    context: Context,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Causal attention of each row's new tokens to all of its tokens so far, in q's dtype.

    The new tokens' own keys and values have been written already. Arguments as in
    `reference.paged_attention`.
    """
    function = choose("attention", context, reference.paged_attention, IMPLEMENTATIONS, q, k, v)
    return function(
        q, k, v, layer, pages, start, lengths,
        scale=scale, window=window, softcap=softcap, sinks=sinks,
    )  # fmt: skip


def ring_attention(
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
    context: Context,
    window: int,
    scale: float,
    softcap: float = 0.0,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Sliding-window attention of each row's new tokens to its ring and to one another, in q's
    dtype. Arguments as in `reference.ring_attention_cached`.
    """
    function = choose(
        "ring_attention", context, reference.ring_attention_cached, RING_IMPLEMENTATIONS,
        q, ring_k, ring_v,
    )  # fmt: skip
    return function(
        q, k, v, ring_k, ring_v, layer, slots, start, lengths,
        window=window, scale=scale, softcap=softcap, sinks=sinks,
    )  # fmt: skip


def paged_write(
    plane: jax.Array,
    rows: jax.Array,
    layer: Any,
    pages: jax.Array,
    start: jax.Array,
    lengths: jax.Array,
    *,
    context: Context,
) -> jax.Array:
    """The plane with each row's real tokens written; arguments as in `reference.paged_write`."""
    function = choose(
        "paged_write", context, reference.paged_write, WRITE_IMPLEMENTATIONS, plane, rows
    )
    return function(plane, rows, layer, pages, start, lengths)
