"""Kimi delta attention: the gated delta rule with one decay per key channel."""

from __future__ import annotations

from typing import Any

import jax

from ...mesh.context import Context
from ..dispatch import Implementation, choose
from ..gated_delta import triton
from . import reference

IMPLEMENTATIONS = (Implementation("triton", "cuda", triton.supports, triton.gated_delta),)


def kda(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    plane: jax.Array,
    layer: Any,
    slots: jax.Array,
    start: jax.Array,
    lengths: jax.Array,
    *,
    context: Context,
) -> tuple[jax.Array, jax.Array]:
    """(outputs, plane with the new states); arguments as in `reference.kda_cached`."""
    function = choose("kda", context, reference.kda_cached, IMPLEMENTATIONS, q, v, g, plane)
    return function(q, k, v, g, beta, plane, layer, slots, start, lengths)
