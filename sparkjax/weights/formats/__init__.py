"""Weight formats: one file each, behind functions that also take dense arrays.

A new format is a `QuantizedTensor` subclass in a sibling file; nothing here changes for it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparkjax.mesh.units import take
from sparkjax.weights.formats import gather
from sparkjax.weights.formats.base import COLS, ROWS, QuantizedTensor
from sparkjax.weights.formats.mixed import stack

__all__ = [
    "COLS",
    "ROWS",
    "QuantizedTensor",
    "dequantize",
    "is_quantized",
    "logical_shape",
    "pick",
    "stack",
    "take_rows",
]


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


def pick(
    x: Any, axis: int, index: np.ndarray, parts: int = 1, only: int | None = None
) -> Any:
    """On the host: x with the rows (axis ROWS) or columns (COLS) at `index`, -1 for zeros.

    Args:
      x: a numpy array, or a QuantizedTensor over some.
      index: int [parts * size].
      parts: ranks that the result is spread over along this axis: each plane of a quantized
        result falls into so many equal pieces, one for each rank's `size` rows or columns.
      only: the one piece that is wanted; None is all of them, side by side.

    Where a range is picked, the result is views: nothing of a mapped file is read.
    """
    if is_quantized(x):
        return x.pick(axis, np.asarray(index), parts, only)
    return take(np.asarray(x), axis, gather.own(np.asarray(index), parts, only)[0])
