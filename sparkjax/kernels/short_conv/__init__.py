"""Short depthwise causal convolutions with their activation."""

from __future__ import annotations

import jax

from ...mesh.context import Context
from ..dispatch import Implementation, choose
from . import reference, triton

IMPLEMENTATIONS = (Implementation("triton", "cuda", triton.supports, triton.short_conv),)


def short_conv(
    x: jax.Array,
    tail: jax.Array,
    weight: jax.Array,
    *,
    context: Context,
    dilation: int = 1,
    activation: str = "silu",
) -> jax.Array:
    """[B, Q, C] in x's dtype; arguments as in `reference.short_conv`."""
    function = choose("short_conv", context, reference.short_conv, IMPLEMENTATIONS, x, weight)
    return function(x, tail, weight, dilation=dilation, activation=activation)
