"""Grouped-query attention of each query to the cached tokens that were chosen for it."""

from __future__ import annotations

from typing import Any

import jax

from ...mesh.context import Context
from ..dispatch import Implementation, choose
from . import reference, triton

IMPLEMENTATIONS = (Implementation("triton", "cuda", triton.supports, triton.sparse_attention),)


def sparse_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    layer: Any,
    pages: jax.Array,
    selected: jax.Array,
    *,
    context: Context,
    scale: float,
) -> jax.Array:
    """[B, Q, Hq, Dv] in q's dtype; arguments as in `reference.sparse_attention`."""
    function = choose("sparse_gqa", context, reference.sparse_attention, IMPLEMENTATIONS, q, k, v)
    return function(q, k, v, layer, pages, selected, scale=scale)
