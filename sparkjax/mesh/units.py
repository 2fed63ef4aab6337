"""How one dimension of a weight is cut into units and laid over ranks.

Ranks hold equal shares (a NamedSharding refuses uneven ones), and some dimensions do not divide:
nine query heads over two ranks, one key head over four. So a sharded dimension is declared as
units (a head, a row of an MLP, a vocabulary entry), and `source[i]` names the checkpoint's unit
that stands at place i: -1 is padding (zeros), and a unit may stand at several places (a key head
that several ranks need). One rank gives the identity, and nothing is moved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

PAD = -1


@dataclasses.dataclass(frozen=True)
class Units:
    """A dimension of `len(source) * size` elements made of units of `size` elements."""

    size: int
    source: tuple[int, ...]
    count: int
    """How many units the checkpoint has."""

    @property
    def elements(self) -> int:
        return len(self.source) * self.size

    @property
    def identity(self) -> bool:
        return self.source == tuple(range(self.count))

    def gather(self) -> np.ndarray:
        """int64 [elements]: the checkpoint's element at each place, -1 for padding."""
        source = np.asarray(self.source, np.int64)[:, None]
        inside = np.arange(self.size, dtype=np.int64)
        return np.where(source < 0, PAD, source * self.size + inside).reshape(-1)

    def rank(self, rank: int, ranks: int) -> Units:
        """The share of one rank."""
        share = len(self.source) // ranks
        return dataclasses.replace(self, source=self.source[rank * share : (rank + 1) * share])


def even(count: int, ranks: int, size: int = 1) -> Units:
    """`count` units in order, padded at the end to a multiple of `ranks`."""
    padded = -(-count // ranks) * ranks
    return Units(size, (*range(count), *(PAD,) * (padded - count)), count)


BLOCKS = (128, 64, 32, 16)
"""Channels that the scales of quantized weights are shared by: 128 (FP8 blocks) to 16 (NVFP4)."""
MOST_PADDING = 1 / 16


def channels(count: int, ranks: int) -> Units:
    """`count` channels of an MLP in whole blocks of quantized weights, the largest blocks that pad
    by at most MOST_PADDING; single channels where none do. A block cut in two would need scales of
    its own for each channel."""
    for size in BLOCKS:
        if ranks > 1 and count % size == 0:
            units = even(count // size, ranks, size)
            if units.elements <= count * (1 + MOST_PADDING):
                return units
    return even(count, ranks)


@dataclasses.dataclass(frozen=True)
class HeadLayout:
    """Query and key/value heads of grouped-query attention over ranks.

    Every rank holds the same number of key heads, each with the same number of query heads right
    behind one another, so `query head // group` is the key head on every rank.
    """

    query: tuple[int, ...]
    key: tuple[int, ...]
    query_heads: int
    key_heads: int

    def queries(self, head_dim: int) -> Units:
        return Units(head_dim, self.query, self.query_heads)

    def keys(self, head_dim: int) -> Units:
        return Units(head_dim, self.key, self.key_heads)


def grouped_heads(query_heads: int, key_heads: int, ranks: int) -> HeadLayout:
    """Lays `query_heads` and `key_heads` over `ranks`.

    With at least as many key heads as ranks, key heads are dealt out with their groups; with
    fewer, a key head is repeated and its group is shared out among the copies.
    """
    if query_heads % key_heads:
        raise ValueError(
            f"num_attention_heads {query_heads} is not a multiple of num_key_value_heads {key_heads}"
        )
    group = query_heads // key_heads
    copies = min(-(-ranks // key_heads), group) if key_heads < ranks else 1
    share = -(-group // copies)
    places = key_heads * copies
    padded = -(-places // ranks) * ranks
    query: list[int] = []
    key: list[int] = []
    for place in range(padded):
        if place >= places:
            query += [PAD] * share
            key.append(PAD)
            continue
        head, copy = divmod(place, copies)
        members = range(copy * share, min((copy + 1) * share, group))
        query += [head * group + m for m in members] + [PAD] * (share - len(members))
        key.append(head)
    return HeadLayout(tuple(query), tuple(key), query_heads, key_heads)


def take(array: np.ndarray, axis: int, index: Sequence[int] | np.ndarray) -> np.ndarray:
    """`array` gathered along `axis`; places with index -1 are zeros. A range gives a view."""
    index = np.asarray(index)
    if len(index) and index[0] >= 0 and (index == index[0] + np.arange(len(index))).all():
        at = (slice(None),) * (axis % array.ndim)
        return array[(*at, slice(int(index[0]), int(index[-1]) + 1))]
    taken = np.take(array, np.maximum(index, 0), axis=axis)
    if (index < 0).any():
        shape = [1] * array.ndim
        shape[axis] = len(index)
        taken = np.where((index >= 0).reshape(shape), taken, np.zeros((), array.dtype))
    return taken
