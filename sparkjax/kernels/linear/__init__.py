"""y = x W^T for a weight in any format, and rows of an embedding table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ...mesh.context import Context
from ...weights.formats.mixed import Mixed
from ..dispatch import Implementation, choose
from . import native, reference, triton

IMPLEMENTATIONS = (
    Implementation("native", "cpu", native.supports, native.linear),
    Implementation("triton", "cuda", triton.supports, triton.linear),
)
EMBED_IMPLEMENTATIONS = (Implementation("native", "cpu", native.supports_embed, native.embed),)


def linear(
    x: jax.Array, w: Any, layer: Any = None, *, context: Context, rows: jax.Array | None = None
) -> jax.Array:
    """x [..., K] times the transpose of w [N, K] (or of w[layer], w [L, N, K]): [..., N].

    Accumulates in float32; the result has x's dtype. With `rows` (int32 []) only that many
    leading rows of the flattened x need be computed; the rest of the result is arbitrary but
    finite.
    """
    if isinstance(w, Mixed) and len(w.stacked) == 1:
        # Each format has the kernel that it has by itself.
        return w.member(
            layer, lambda stack, at: linear(x, stack, at[0], context=context, rows=rows)
        )
    function = choose("linear", context, reference.linear, IMPLEMENTATIONS, x, w)
    return function(x, w, layer, rows=rows)


def linear_float32(x: jax.Array, w: Any, layer: Any = None, *, context: Context) -> jax.Array:
    """float32 [..., N]: `linear` of operands and a result in float32, as routers want it.

    On a GPU the kernel reads a stack in place, where XLA would copy each layer's matrix first; of
    bfloat16 operands its products are exact too.
    """
    kernel = context.platform == "cuda" and context.kernel("linear") != "reference"
    if kernel and triton.supports(x, w) is None:
        return triton.linear(x, w, layer, dtype=jnp.float32)
    return reference.linear_float32(x, w, layer)


def linear_group(
    x: jax.Array,
    weights: Sequence[Any],
    layer: Any = None,
    *,
    context: Context,
    rows: jax.Array | None = None,
) -> list[jax.Array]:
    """`linear` of one x with several weights (queries, keys and values; gate and up): one launch
    where an implementation has it."""
    if any(isinstance(w, Mixed) for w in weights):
        return [linear(x, w, layer, context=context, rows=rows) for w in weights]
    chosen = {choose("linear", context, reference.linear, IMPLEMENTATIONS, x, w) for w in weights}
    if chosen == {native.linear}:
        return native.linear_group(x, weights, layer, rows)
    if chosen == {triton.linear}:
        return triton.linear_group(x, weights, layer)
    return [linear(x, w, layer, context=context, rows=rows) for w in weights]


def embed(ids: jax.Array, w: Any, *, context: Context) -> jax.Array:
    """Rows `ids` (int32 [...]) of the table w [N, K], in the context's dtype: [..., K]."""
    function = choose("linear", context, reference.embed, EMBED_IMPLEMENTATIONS, ids, w)
    return function(ids, w).astype(context.dtype)
