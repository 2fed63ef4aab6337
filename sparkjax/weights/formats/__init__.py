"""Weight formats: one file each, behind four functions that also take dense arrays.

A new format is a `QuantizedTensor` subclass in a sibling file; nothing here changes for it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from sparkjax.weights.formats.base import QuantizedTensor

__all__ = ["QuantizedTensor", "dequantize", "is_quantized", "logical_shape", "take_rows"]


def is_quantized(x: Any) -> bool:
    """Whether x is a quantized weight rather than an array."""
    return isinstance(x, QuantizedTensor)


def logical_shape(x: Any) -> tuple[int, ...]:
    """The shape of the weights as numbers, [..., N, K]."""
    return tuple(x.shape)


def dequantize(x: Any, layer: Any = None, dtype: Any = jnp.float32) -> jax.Array:
    """The weights as numbers, in plain jnp: the reference of every kernel.

    Args:
      x: an array or a QuantizedTensor, [..., N, K].
      layer: None for all, else an index (or tuple of indices) of the leading axes; may be traced.
      dtype: of the result. The arithmetic itself is in float32.
    """
    if is_quantized(x):
        return x.dequantize(layer, dtype)
    return jnp.asarray(x if layer is None else x[layer]).astype(dtype)


def take_rows(x: Any, ids: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
    """Rows `ids` of a table [N, K] as numbers [*ids.shape, K]: an embedding lookup.

    Only the rows asked for are dequantized. Ids out of range are clamped.
    """
    if is_quantized(x):
        return x.take_rows(ids, dtype)
    return x[ids].astype(dtype)
