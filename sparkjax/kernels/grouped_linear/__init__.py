"""Several projections side by side in one weight, each with inputs of its own."""

from __future__ import annotations

from typing import Any

import jax

from ...mesh.context import Context
from ..dispatch import Implementation, choose
from . import reference, triton

IMPLEMENTATIONS = (Implementation("triton", "cuda", triton.supports, triton.grouped),)


def grouped(x: jax.Array, w: Any, layer: Any = None, *, context: Context) -> jax.Array:
    """x [..., G, K] and w [(L,) G N, K] -> [..., G, N]; arguments as in `reference.grouped`."""
    function = choose("grouped_linear", context, reference.grouped, IMPLEMENTATIONS, x, w)
    return function(x, w, layer)
