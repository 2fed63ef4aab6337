"""Kimi delta attention: the gated delta rule with one decay per key channel."""

from __future__ import annotations

import jax

from ...mesh.context import Context
from ..dispatch import Implementation, choose
from . import reference

IMPLEMENTATIONS: tuple[Implementation, ...] = ()


def kda(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    lengths: jax.Array,
    keep: int = 1,
    *,
    context: Context,
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, jax.Array] | None]:
    """(outputs, last state, recent states or None); arguments as in `reference.kda`."""
    function = choose("kda", context, reference.kda, IMPLEMENTATIONS, q, v, keep)
    return function(q, k, v, g, beta, state, lengths, keep)
