"""Attention over latent rows that are key and value at once: all of some, chosen ones of others."""

from __future__ import annotations

from typing import Any

import jax

from ...mesh.context import Context
from ..dispatch import Implementation, choose
from . import reference, triton
from .reference import gather_rows

__all__ = ["gather_rows", "latent_attention"]

IMPLEMENTATIONS = (Implementation("triton", "cuda", triton.supports, triton.latent_attention),)


def latent_attention(
    q: jax.Array,
    *,
    context: Context,
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
    """[B, Q, heads, value_dim] in q's dtype; arguments as in `reference.latent_attention`."""
    function = choose(
        "sparse_attention", context, reference.latent_attention, IMPLEMENTATIONS,
        q, plane, value_dim,
    )  # fmt: skip
    return function(
        q, scale=scale, value_dim=value_dim, rows=rows, seen=seen, plane=plane, layer=layer,
        pages=pages, selected=selected, sinks=sinks,
    )  # fmt: skip
