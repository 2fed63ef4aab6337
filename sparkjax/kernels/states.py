"""Planes of states that sequences carry from token to token, addressed by position.

A plane [L, slots, n, ...] keeps the states after each sequence's last n positions: the one after
position p lies at place p % n of the sequence's slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp


def read(plane: jax.Array, layer: Any, slots: jax.Array, start: jax.Array) -> jax.Array:
    """[B, ...]: the states in front of positions `start` (int32 [B]); zeros in front of 0."""
    state = plane[layer, slots, (start - 1) % plane.shape[2]]
    fresh = (start == 0).reshape(-1, *(1,) * (state.ndim - 1))
    return jnp.where(fresh, jnp.zeros((), state.dtype), state)


def keep(
    plane: jax.Array,
    layer: Any,
    slots: jax.Array,
    start: jax.Array,
    lengths: jax.Array,
    last: jax.Array,
    recent: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """The plane with the states that a roll-back may return to.

    Args:
      slots, start, lengths: int32 [B]: where each row's states live, its first position, and how
        many tokens it brought (0: nothing is written).
      last: [B, ...], the state after each row's last token.
      recent: None, or states [B, m, ...] and int32 [B, m], after which token of the row each
        stands (`lengths` or more: none).
    """
    size = plane.shape[2]
    if recent is not None:
        states, index = recent
        place = jnp.where(index < lengths[:, None], (start[:, None] + index) % size, size)
        plane = plane.at[layer, slots[:, None], place].set(states.astype(plane.dtype), mode="drop")
    place = jnp.where(lengths > 0, (start + lengths - 1) % size, size)
    return plane.at[layer, slots, place].set(last.astype(plane.dtype), mode="drop")


def through(
    rule: Callable[..., Any],
    tokens: Sequence[jax.Array],
    plane: jax.Array,
    layer: Any,
    slots: jax.Array,
    start: jax.Array,
    lengths: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """A recurrence over rows of tokens whose states live in a plane.

    Args:
      rule: (*tokens, states, lengths, how many to keep) -> (outputs, last states, recent states
        or None), see `keep`.
      tokens: what the rule reads of each token, [B, Q, ...].

    Returns:
      The outputs, and the plane with the new states.
    """
    state = read(plane, layer, slots, start)
    out, last, recent = rule(*tokens, state, lengths, plane.shape[2])
    return out, keep(plane, layer, slots, start, lengths, last, recent)
