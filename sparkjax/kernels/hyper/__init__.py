"""The coefficients of a hyper-connection site."""

from __future__ import annotations

from typing import Any

import jax

from ...mesh.context import Context
from ..dispatch import Implementation, choose
from . import reference, triton

IMPLEMENTATIONS = (Implementation("triton", "cuda", triton.supports, triton.coefficients),)


def coefficients(
    streams: jax.Array,
    fn: Any,
    base: jax.Array,
    scale: jax.Array,
    layer: Any,
    *,
    context: Context,
    rounds: int,
    eps: float,
    norm_eps: float,
) -> reference.Coefficients:
    """float32 (pre, post, mix); arguments as in `reference.coefficients`."""
    function = choose("hyper", context, reference.coefficients, IMPLEMENTATIONS, streams, fn)
    return function(streams, fn, base, scale, layer, rounds=rounds, eps=eps, norm_eps=norm_eps)
