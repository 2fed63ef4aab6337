"""What picking rows or columns does to planes, blocks and packed words, on the host.

A format's `pick` is written with these. An index [parts * size] names the source of every
element of the result, -1 for padding; each part becomes a rank's share.
"""

from __future__ import annotations

import functools

import numpy as np

from ...mesh.units import take


def is_identity(index: np.ndarray, size: int, parts: int) -> bool:
    """Whether picking changes nothing."""
    return parts == 1 and len(index) == size and bool((index == np.arange(size)).all())


def own(index: np.ndarray, parts: int, only: int | None) -> tuple[np.ndarray, int]:
    """The index of one part alone and 1; without `only`, all of it and `parts`."""
    if only is None:
        return index, parts
    size = len(index) // parts
    return index[only * size : (only + 1) * size], 1


def units_of(index: np.ndarray, unit: int, parts: int) -> np.ndarray | None:
    """The units that an index consists of, where every part is a row of whole units, one after the
    other; else None."""
    size = len(index) // parts
    if unit < 1 or size % unit or not size:
        return None
    starts = index.reshape(-1, unit)
    if (starts[:, 0] < 0).any() or (starts[:, 0] % unit).any():
        return None
    return starts[:, 0] // unit if (starts == starts[:, :1] + np.arange(unit)).all() else None


def copies(plane: np.ndarray | None, axis: int, parts: int) -> np.ndarray | None:
    """A plane that does not vary along the axis, once for each share."""
    if plane is None or parts == 1:
        return plane
    return np.concatenate([plane] * parts, axis)


def regroup(
    index: np.ndarray,
    block: int,
    size: int,
    parts: int,
    *,
    wild: bool = True,
    only: int | None = None,
) -> tuple[int, np.ndarray]:
    """Blocks of the result when its elements come from blocks of `block` elements.

    Where blocks of the result would mix blocks of the source they are made smaller (the largest
    divisor of `block` that works), and the source's scales stand for several of them.

    Args:
      block: elements of a block of the source; 0 is all.
      size: elements of the source.
      wild: whether padding can be in any block (its stored code is zero under every scale);
        otherwise it gets blocks of its own.
      only: the part whose blocks are wanted, None for all of them; the block size is that of all
        parts together either way.

    Returns:
      The result's block size, and the source block of each of its blocks (-1: padding).
    """
    found, groups = _regrouped(index.astype(np.int64).tobytes(), block, size, parts, wild)
    return found, own(groups, parts, only)[0]


@functools.lru_cache(maxsize=256)
def _regrouped(
    raw: bytes, block: int, size: int, parts: int, wild: bool
) -> tuple[int, np.ndarray]:
    index = np.frombuffer(raw, np.int64)
    if block == 0:
        if wild or (index >= 0).all():
            return 0, np.zeros(parts, np.int64)
        block = size
    source = np.where(index < 0, -1, index // block).reshape(parts, -1)
    share = source.shape[1]
    # Anything joins a block of elements that are not there.
    absent, free = -2, (-1, -2) if wild else (-2,)
    for b in (d for d in range(block, 0, -1) if block % d == 0):
        fill = -share % b
        chunks = np.pad(source, ((0, 0), (0, fill)), constant_values=absent).reshape(-1, b)
        joins = np.isin(chunks, free)
        low = np.where(joins, np.iinfo(np.int64).max, chunks).min(1)
        high = np.where(joins, -3, chunks).max(1)
        if ((low == high) | joins.all(1)).all():
            groups = np.where(joins.all(1), -1, high)
            return b, groups
    raise AssertionError("blocks of one element always work")


def take_scales(plane: np.ndarray, axis: int, groups: np.ndarray) -> np.ndarray:
    """Scales (or zero points) of the result's blocks; those of padding are arbitrary but finite."""
    return take(plane, axis, np.maximum(groups, 0))


def by_parts(fields: np.ndarray, parts: int) -> np.ndarray:
    """[..., parts * size] -> [..., parts, size], to pack each share by itself."""
    return fields.reshape(*fields.shape[:-1], parts, -1)


def joined(packed: np.ndarray) -> np.ndarray:
    """[..., parts, words] -> [..., parts * words]."""
    return packed.reshape(*packed.shape[:-2], -1)
