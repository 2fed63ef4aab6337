"""The jnp reference of `linear` and `embed`: dequantize, then multiply."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ...weights import formats


def linear(x: jax.Array, w: Any, layer: Any = None, *, rows: jax.Array | None = None) -> jax.Array:
    """y[..., n] = sum_k x[..., k] W[n, k], accumulated in float32, in x's dtype.

    Raises:
      ValueError: where the inner dimensions differ.
    """
    del rows
    shape = formats.logical_shape(w)
    if shape[-1] != x.shape[-1]:
        raise ValueError(f"linear: x is {x.shape}, the weight {shape}: inner dimensions differ")
    # float32 activations want float32 products (no TF32, no bf16 passes).
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    matrix = formats.dequantize(w, layer, x.dtype)
    y = jax.lax.dot_general(
        x,
        matrix,
        (((x.ndim - 1,), (1,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    return y.astype(x.dtype)


def linear_float32(x: jax.Array, w: Any, layer: Any = None) -> jax.Array:
    """float32 [..., N]: `linear` with both operands in float32."""
    matrix = formats.dequantize(w, layer, jnp.float32)
    highest = jax.lax.Precision.HIGHEST
    return jnp.einsum("...k,nk->...n", x.astype(jnp.float32), matrix, precision=highest)


def embed(ids: jax.Array, w: Any) -> jax.Array:
    """Row ids[i] of the table, float32 (or the table's own float dtype)."""
    return formats.take_rows(w, ids)
