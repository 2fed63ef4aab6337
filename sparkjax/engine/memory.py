"""The memory of one rank as an itemised table, from declarations alone.

Everything here takes shapes; nothing is allocated. `sparkjax serve` refuses with this table before
it loads, `sparkjax plan` prints it for machines that are not here.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ..models import cache as caches
from ..models import params as declarations
from ..weights import formats
from ..weights.formats.mixed import Mixed
from . import state as states

GIB = 1 << 30
RESERVE = 2 * GIB
"""Bytes left alone where memory is unified: below one to three GiB, a GB10 box starts to swap."""


@dataclasses.dataclass(frozen=True)
class Item:
    """One line of the table: what it is for ("weights", "caches", ...), its name, its bytes."""

    kind: str
    name: str
    nbytes: int


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """What one rank needs and what it has, in bytes."""

    items: tuple[Item, ...]
    available: int

    @property
    def total(self) -> int:
        return sum(item.nbytes for item in self.items)

    @property
    def free(self) -> int:
        """What is left; negative: what is missing."""
        return self.available - self.total

    def of(self, kind: str) -> int:
        return sum(item.nbytes for item in self.items if item.kind == kind)

    def largest(self, count: int = 3) -> str:
        """The largest items in words."""
        found = sorted(self.items, key=lambda item: -item.nbytes)[:count]
        return ", ".join(f"{i.kind} {i.name} {i.nbytes / GIB:.2f} GiB" for i in found)


def weight_items(tree: declarations.Tree, weights: Any, ranks: int) -> list[Item]:
    """One rank's weights by part of the model and format.

    Args:
      tree: the declarations over `ranks`.
      weights: arrays, quantized nodes, or shapes of either, by the same paths, of all ranks.
    """
    leaves = dict(declarations.leaves_of(weights))
    sizes: collections.Counter[tuple[str, str]] = collections.Counter()
    for path, param in declarations.leaves(tree):
        leaf = leaves[path]
        part = path.rsplit(".", 1)[0] if param.experts is None else f"{path.rsplit('.', 1)[0]} experts"
        sizes[part, format_of(leaf)] += nbytes(leaf) // shards(param, ranks)
    return [Item("weights", f"{part} ({kind})", size) for (part, kind), size in sizes.items()]


def cache_items(
    declared: Mapping[str, caches.Declaration], sizes: caches.Sizes, ranks: int, dtype: str
) -> list[Item]:
    """One rank's caches by plane: paged ones are "caches", rings and states "states"."""
    items, specs = [], caches.specs(declared, ranks)
    for name, shape in caches.shapes(declared, sizes, dtype).items():
        parts = ranks if ranks > 1 and any(axis is not None for axis in specs[name]) else 1
        kind = "caches" if isinstance(declared[name], caches.Paged) else "states"
        items.append(Item(kind, name, nbytes(shape) // parts))
    return items


def slot_items(slots: int, vocab: int) -> list[Item]:
    """What the sampler keeps for every slot."""
    shapes = jax.eval_shape(lambda: states.empty_slots(slots, vocab))
    return [Item("slots", "counts, seen tokens, settings", nbytes(shapes))]


def available(device: Any | None = None) -> int:
    """Bytes that may be taken: MemAvailable where CPU and device share memory (a CPU, a GB10),
    else what the device's allocator has left."""
    stats = None if device is None or "GB10" in device.device_kind else device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        return mem_available()
    return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))


def mem_available() -> int:
    """MemAvailable in bytes (what may be taken without swapping)."""
    with Path("/proc/meminfo").open() as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable")


@dataclasses.dataclass(frozen=True)
class Pool:
    """The largest pool of pages that fits.

    Attributes:
      tokens: that it holds.
      page: bytes of a page; 0 where nothing is paged.
      fixed: bytes of the rings and states beside it.
    """

    tokens: int
    page: int
    fixed: int


def largest_pool(
    declared: Mapping[str, caches.Declaration],
    page_size: int,
    slots: int,
    ranks: int,
    dtype: str,
    room: int,
) -> Pool:
    """How many tokens of pages fit into `room` bytes beside the states of `slots` sequences."""

    def size(pages: int) -> int:
        items = cache_items(declared, caches.Sizes(pages, page_size, slots), ranks, dtype)
        return sum(item.nbytes for item in items)

    fixed = size(0)
    page = size(1) - fixed
    return Pool(max(room - fixed, 0) // page * page_size if page else 0, page, fixed)


def shards(param: declarations.Param, ranks: int) -> int:
    """How many ranks share a parameter (1: each holds all of it)."""
    return ranks if any(dim.units is not None for dim in param.dims) else 1


def nbytes(tree: Any) -> int:
    """Bytes of all arrays (or their shapes) of a tree."""
    return sum(math.prod(a.shape) * jnp.dtype(a.dtype).itemsize for a in jax.tree.leaves(tree))


def format_of(leaf: Any) -> str:
    """What the table calls a leaf's format."""
    if not formats.is_quantized(leaf):
        return jnp.dtype(leaf.dtype).name
    if isinstance(leaf, Mixed):
        return " + ".join(sorted({format_of(stack) for stack in leaf.stacks}))
    main = max(jax.tree.leaves(leaf), key=lambda p: math.prod(p.shape))
    return f"{type(leaf).__name__.removesuffix('Tensor').lower()} {jnp.dtype(main.dtype).name}"
