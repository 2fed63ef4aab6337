"""Caches, declared like parameters, and their verbs.

Three kinds cover every family:

* `Paged`: rows addressed by token position through a page table (attention keys and values,
  latents, index keys; `stride` tokens share a row where a family pools them).
* `Ring`: the last `rows` rows of a sequence, at `position % rows` (sliding windows, tails).
* `State`: something that a sequence carries from token to token (recurrences, convolutions), kept
  after each of the last `depth + 1` positions.

All three are **addressed by position**, and that is the whole roll-back: a batch whose `start` is
lower than what was fed before sees the caches as if only `start` tokens had ever been fed, as long
as no more than `depth` tokens are taken back. Nothing needs clearing when a slot changes hands
either, since a sequence that starts at 0 reads nothing that it did not write.

The arrays stay whole: a model carries them through its layers and reads and writes
`array[layer, ...]` in place.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ..mesh import rules
from .batch import Batch
from .params import Dim


@dataclasses.dataclass(frozen=True)
class Paged:
    """[layers, pages, page_size / stride, *dims]; `reads` is how many rows a query looks at where
    an indexer chooses them (None: all; it changes no array)."""

    layers: tuple[int, ...]
    dims: tuple[Dim, ...]
    stride: int = 1
    dtype: str = "cache"
    reads: int | None = None


@dataclasses.dataclass(frozen=True)
class Ring:
    """[layers, slots, rows + depth, *dims]; `rows` is how many a token may look back."""

    layers: tuple[int, ...]
    dims: tuple[Dim, ...]
    rows: int
    dtype: str = "cache"


@dataclasses.dataclass(frozen=True)
class State:
    """[layers, slots, depth + 1, *dims]; zeros before the first token."""

    layers: tuple[int, ...]
    dims: tuple[Dim, ...]
    dtype: str = "float32"


Declaration = Paged | Ring | State
Declarations = Mapping[str, Declaration]
Caches = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much of each kind to allocate.

    Attributes:
      pages, page_size: the pool (tokens a page).
      slots: sequences with rings and states.
      depth: how many fed tokens may be taken back (speculation depth).
    """

    pages: int
    page_size: int
    slots: int
    depth: int = 0


PAGE = 64
"""Tokens a page where nothing says otherwise."""


def page_size(declarations: Declarations) -> int:
    """Tokens a page: PAGE, or the next number that every pooled row divides."""
    return math.lcm(PAGE, *(d.stride for d in declarations.values() if isinstance(d, Paged)))


def shape(declaration: Declaration, sizes: Sizes) -> tuple[int, ...]:
    dims = tuple(dim.stored for dim in declaration.dims)
    layers = len(declaration.layers)
    match declaration:
        case Paged(stride=stride):
            if sizes.page_size % stride:
                raise ValueError(
                    f"engine.page_size {sizes.page_size} must be a multiple of {stride}, "
                    "the number of tokens that this model pools into one row"
                )
            return (layers, sizes.pages, sizes.page_size // stride, *dims)
        case Ring(rows=rows):
            return (layers, sizes.slots, rows + sizes.depth, *dims)
        case State():
            return (layers, sizes.slots, sizes.depth + 1, *dims)


def shapes(declarations: Declarations, sizes: Sizes, dtype: str) -> dict[str, Any]:
    """Shapes and dtypes of the arrays, without allocating. `dtype` is that of "cache" entries."""
    return {
        name: jax.ShapeDtypeStruct(
            shape(d, sizes), jnp.dtype(dtype if d.dtype == "cache" else d.dtype)
        )
        for name, d in declarations.items()
    }


def specs(declarations: Declarations, ranks: int) -> dict[str, PartitionSpec]:
    return {
        name: rules.spec((None, None, None, *(dim.axis for dim in d.dims)), ranks)
        for name, d in declarations.items()
    }


def allocate(declarations: Declarations, sizes: Sizes, dtype: str) -> Caches:
    return {
        name: jnp.zeros(s.shape, s.dtype) for name, s in shapes(declarations, sizes, dtype).items()
    }


def nbytes(declarations: Declarations, sizes: Sizes, dtype: str) -> int:
    return sum(
        math.prod(s.shape) * s.dtype.itemsize
        for s in shapes(declarations, sizes, dtype).values()
    )


# --- Paged ------------------------------------------------------------------------------------


def gather_pages(plane: jax.Array, layer: Any, batch: Batch) -> jax.Array:
    """[B, T * S, ...]: each row's pages in order of position (unwritten places are arbitrary)."""
    pages = plane[layer, batch.pages]
    b, t, s = pages.shape[:3]
    return pages.reshape(b, t * s, *pages.shape[3:])


def copy_page(caches: Caches, declarations: Declarations, source: Any, target: Any) -> Caches:
    """All paged planes with page `target` made equal to page `source`."""
    return {
        name: array.at[:, target].set(array[:, source])
        if isinstance(declarations[name], Paged)
        else array
        for name, array in caches.items()
    }


# --- Ring -------------------------------------------------------------------------------------


def write_ring(ring: jax.Array, layer: Any, rows: jax.Array, batch: Batch) -> jax.Array:
    """Puts each row's last real tokens (as many as the ring holds) at `position % R`."""
    size = ring.shape[2]
    index = jnp.arange(rows.shape[1], dtype=jnp.int32)
    kept = batch.valid & (index >= batch.lengths[:, None] - size)
    place = jnp.where(kept, batch.positions % size, size)
    return ring.at[layer, batch.slots[:, None], place].set(rows.astype(ring.dtype), mode="drop")


# --- Snapshots of one sequence ------------------------------------------------------------------


def snapshot(caches: Caches, declarations: Declarations, slot: Any) -> Caches:
    """What a sequence holds outside the pages: its rings and states, [layers, ...] each."""
    return {
        name: array[:, slot]
        for name, array in caches.items()
        if not isinstance(declarations[name], Paged)
    }


def restore(caches: Caches, declarations: Declarations, slot: Any, saved: Caches) -> Caches:
    """The caches with a snapshot put into `slot` (any slot: not only the one it came from)."""
    return {
        name: array if isinstance(declarations[name], Paged) else array.at[:, slot].set(saved[name])
        for name, array in caches.items()
    }
