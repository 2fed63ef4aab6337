"""Weights that are whole blocks and an index into them (`formats.cover`), for kernels that read the
blocks as they are: inputs are put in their places among the blocks', outputs are taken from there.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ...weights.formats.base import ROWS
from ...weights.formats.cover import Covered
from .planes import Spec, spec_of


def spec_below(w: Any) -> Spec | str:
    """The Spec of the blocks below any number of indices, or why the kernels cannot take them."""
    if not isinstance(w, Covered):
        return spec_of(w)
    return "a weight of several ranks' shares" if w.shares != (1, 1) else spec_below(w.inner)


def places(w: Covered, member: jax.Array) -> jax.Array:
    """The index of some members: int32 [members, N or K].

    Args:
      member: int32 [members], places in the leading axes taken as one.
    """
    return w.index.reshape(-1, w.rows if w.axis == ROWS else w.cols)[member]


def spread(x: jax.Array, index: jax.Array, width: int) -> jax.Array:
    """Inputs at their places in the blocks, zeros elsewhere: [R, K] -> [R, width].

    Args:
      index: int32 [R, K] or [1, K], -1 for inputs that have no place.
    """
    row = jnp.arange(x.shape[0], dtype=jnp.int32)[:, None]
    beyond = width + jnp.arange(x.shape[1], dtype=jnp.int32)
    column = jnp.where(index < 0, beyond, index)
    zero = jnp.zeros((x.shape[0], width), x.dtype)
    return zero.at[row, column].set(x, mode="drop", unique_indices=True)


def taken(y: jax.Array, index: jax.Array) -> jax.Array:
    """Outputs from their places in the blocks, zeros where there are none: [R, width] -> [R, N].

    Args:
      index: int32 [R, N] or [1, N], -1 for zeros.
    """
    row = jnp.arange(y.shape[0], dtype=jnp.int32)[:, None]
    return jnp.where(index < 0, jnp.zeros((), y.dtype), y[row, jnp.maximum(index, 0)])
