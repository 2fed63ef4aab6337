"""Which rows meet which expert: (token, choice) pairs in tiles of one expert each."""

from __future__ import annotations

import jax
import jax.numpy as jnp

COMPARED = 512
"""Pairs up to which each is compared with each, in two reductions; beyond, they are sorted."""


def most_tiles(pairs: int, experts: int, size: int) -> int:
    """The most tiles of `size` pairs that `pairs` choices among `experts` fall into: every expert
    has at most one that is not full."""
    return min(pairs, pairs // size + experts)


def tiles(ids: jax.Array, experts: int, size: int) -> tuple[jax.Array, jax.Array]:
    """Pairs p = t * k + j of one expert side by side, in tiles.

    Args:
      ids: int32 [T, k], the experts of each token; all -1 where it has none.
      experts: how many there are.
      size: pairs of a tile.

    Returns:
      (expert int32 [tiles], pair int32 [tiles, size]); -1 where there is none. Within an expert
      pairs ascend. Pairs of no expert are in tiles of none.
    """
    flat = ids.reshape(-1)
    if ids.shape[0] == 1:
        # A token's experts are distinct.
        rest = jnp.full((flat.shape[0], size - 1), -1, jnp.int32)
        return flat, jnp.concatenate([jnp.arange(flat.shape[0], dtype=jnp.int32)[:, None], rest], 1)
    if flat.shape[0] <= COMPARED:
        return _compared(flat, size)
    # Those of none come last.
    expert, pair = _sorted(
        jnp.where(flat < 0, experts, flat),
        most_tiles(flat.shape[0], experts + 1, size),
        experts + 1,
        size,
    )
    return jnp.where(expert == experts, -1, expert), pair


def _compared(flat: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """A place for every pair, with a tile where it is the first of one."""
    place = jnp.arange(flat.shape[0], dtype=jnp.int32)
    same = flat[:, None] == flat[None, :]
    within = (same & (place[None, :] < place[:, None])).sum(1, dtype=jnp.int32)
    first = within % size == 0
    slot = within[None, :] - within[:, None]
    mine = (same & first[:, None])[:, None, :] & (
        slot[:, None, :] == jnp.arange(size, dtype=jnp.int32)[None, :, None]
    )
    return jnp.where(first, flat, -1), jnp.where(mine, place, -1).max(2)


def _sorted(flat: jax.Array, count: int, experts: int, size: int) -> tuple[jax.Array, jax.Array]:
    """Tiles in the order of their experts."""
    place = jnp.arange(flat.shape[0], dtype=jnp.int32)
    held = jnp.zeros(experts, jnp.int32).at[flat].add(1, mode="drop")
    tiles_of = -(-held // size)
    start = jnp.cumsum(tiles_of) - tiles_of
    order = jnp.argsort(flat, stable=True)
    rank = jnp.zeros_like(flat).at[order].set(place)
    within = rank - (jnp.cumsum(held) - held)[flat]
    tile = start[flat] + within // size
    pair = jnp.full((count, size), -1, jnp.int32).at[tile, within % size].set(place, mode="drop")
    return jnp.full(count, -1, jnp.int32).at[tile].set(flat, mode="drop"), pair
