"""The gated delta rule: a linear-attention recurrence with one decay per head."""

from __future__ import annotations

from typing import Any

import jax

from ...mesh.context import Context
from ..dispatch import Implementation, choose
from . import reference, triton

IMPLEMENTATIONS = (Implementation("triton", "cuda", triton.supports, triton.gated_delta),)


def gated_delta(
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
    """(outputs, plane with the new states); arguments as in `reference.gated_delta_cached`."""
    function = choose(
        "gated_delta", context, reference.gated_delta_cached, IMPLEMENTATIONS, q, v, g, plane
    )
    return function(q, k, v, g, beta, plane, layer, slots, start, lengths)
