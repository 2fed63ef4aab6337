"""Mixture of experts: every token through its chosen experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from ...mesh.context import Context
from ..dispatch import Implementation, choose
from . import reference, triton

IMPLEMENTATIONS = (Implementation("triton", "cuda", triton.supports, triton.experts),)


def experts(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    gate: Any,
    up: Any,
    down: Any,
    layer: Any,
    activation: Callable[[jax.Array], jax.Array],
    limit: float | None = None,
    *,
    context: Context,
) -> jax.Array:
    """The weighted sum of each token's experts; arguments as in `reference.experts`."""
    function = choose("moe", context, reference.experts, IMPLEMENTATIONS, x, gate, up, down)
    return function(x, ids, weights, gate, up, down, layer, activation, limit)
