"""Which bytes of a checkpoint's files one rank reads: known from the headers, like a plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..models import params as declarations
from ..models.params import Param, Tree
from . import spans, stream
from .checkpoint import Checkpoint, tensors_of
from .direct import Sources, extent, run
from .spans import Range, merged

SMALL = 1 << 16
"""Bytes up to which a tensor is wanted whole by every rank: how larger ones are cut may depend on
what is in it (an order of groups, for instance)."""


def wanted(
    tree: Tree, checkpoint: Checkpoint, ranks: int, rank: int, whole: Iterable[str] = ()
) -> dict[Path, list[Range]]:
    """For each file, the byte ranges that a load of this rank reads, in order.

    Ranges are exact where a rank's share is a view of the file; what has to be computed from a
    tensor wants all of it, and so do columns whose rows lie closer together than `spans.GAP`.

    Args:
      whole: further tensors, all of whose bytes are wanted.
    """
    found = _Found(checkpoint)
    last: tuple[str, Any] = ("", None)
    for _, param in declarations.leaves(tree):
        cuts = stream.cuts_of(param, ranks)
        for _, fill in param.places():
            option = stream.spelling(param, fill, checkpoint)
            if option is None:
                continue
            name = option if isinstance(option, str) else option.name.format(**fill)
            if name != last[0]:
                last = (name, checkpoint.weight(name, check=False))
            found.member(name, _planes(param, last[1], option, fill, cuts, ranks, rank))
    for name in {*whole, *_small(checkpoint)}:
        found.all_of(name)
    return {path: merged(ranges) for path, ranges in found.ranges.items()}


def _small(checkpoint: Checkpoint) -> Iterator[str]:
    for name in checkpoint.names:
        if checkpoint.read(name).nbytes <= SMALL:
            yield name


def _planes(
    param: Param, weight: Any, option: Any, fill: Any, cuts: Any, ranks: int, rank: int
) -> list[np.ndarray] | None:
    """The arrays that a member is made of; None where zeros in the file's place cannot be cut."""
    try:
        made = stream.member_of(param, weight, option, fill, cuts, ranks, rank, False, param.name)
    except (ValueError, IndexError):
        return None
    return jax.tree.leaves(made)


class _Found:
    """Ranges by file, collected."""

    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint = checkpoint
        self.ranges: dict[Path, list[Range]] = {path: [] for path, _ in checkpoint.files}
        self._sources = Sources(checkpoint.files)

    def member(self, name: str, planes: list[np.ndarray] | None) -> None:
        held = [p for p in planes or () if not isinstance(p, np.ndarray) or p.size]
        places = [self._place(plane) for plane in held]
        if planes is None or any(place is None for place in places):
            for tensor in tensors_of(self.checkpoint, name):
                self.all_of(tensor)
            return
        for place, plane in zip(places, held, strict=True):
            assert place is not None
            path, begin = place
            self.ranges[path] += _runs(plane, begin)

    def all_of(self, tensor: str) -> None:
        array = self.checkpoint.read(tensor)
        place = self._place(array)
        assert place is not None or not array.size
        if place is not None:
            self.ranges[place[0]].append((place[1], place[1] + array.nbytes))

    def _place(self, plane: Any) -> tuple[Path, int] | None:
        """The file and the first byte of a view; None for what is no view of a file."""
        source = self._sources.of(plane) if isinstance(plane, np.ndarray) else None
        return None if source is None else (source.path, plane.ctypes.data - source.base)


def _runs(view: np.ndarray, begin: int) -> Iterator[Range]:
    """The byte ranges of a view that begins at a byte of its file."""
    span = extent(view)
    if not view.size:
        return
    axes = [a for a in range(view.ndim) if view.shape[a] > 1]
    axis = max(axes, key=lambda a: view.strides[a], default=None)
    if run(view) == view.nbytes or axis is None:
        yield begin, begin + span
        return
    inner = view[(slice(None),) * axis + (slice(0, 1),)]
    if view.strides[axis] - extent(inner) <= spans.GAP and run(view) <= spans.GAP:
        yield begin, begin + span
        return
    for i in range(view.shape[axis]):
        part = view[(slice(None),) * axis + (slice(i, i + 1),)]
        yield from _runs(part, begin + i * view.strides[axis])
