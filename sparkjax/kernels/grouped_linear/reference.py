"""The jnp reference of several projections side by side in one weight."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ...weights import formats


def grouped(x: jax.Array, w: Any, layer: Any = None) -> jax.Array:
    """y[..., g, n] = sum_k x[..., g, k] W[g N + n, k], accumulated in float32, in x's dtype.

    Args:
      x: [..., G, K].
      w: a weight [L, G N, K] or [G N, K], any format.
      layer: int or int32 [], the index into L.
    """
    groups, k = x.shape[-2:]
    matrix = formats.dequantize(w, layer, x.dtype).reshape(groups, -1, k)
    return jnp.einsum(
        "...gk,gnk->...gn",
        x,
        matrix,
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    ).astype(x.dtype)
