"""Bytes, operations and seconds of a decode step and of a prefill, from declarations alone.

The model of time is a roofline with gaps:

    step = bytes read / read rate + launches * launch gap + collectives
    tile = max(bytes read / read rate, operations / matrix rate) + launches * gap + collectives

It leaves out what overlaps imperfectly (a shared memory controller, prefetch), so a projection is
a bound that a good implementation approaches, not a promise.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from ..engine.memory import nbytes, shards
from ..models import cache as caches
from ..models import params as declarations
from .devices import Device
from .hlo import Counts


@dataclasses.dataclass(frozen=True)
class Work:
    """What one rank's share of a model is made of.

    Attributes:
      dense: bytes of weights that every step reads whole.
      experts: (bytes of one rank's stack, experts, chosen a token) of every expert parameter.
      rows: bytes of one row of each table that is looked up.
      dense_numbers, expert_numbers: the same weights counted as numbers (for operations).
      planes: what a query reads of the caches.
    """

    dense: int
    experts: tuple[tuple[int, int, int], ...]
    rows: int
    dense_numbers: int
    expert_numbers: tuple[tuple[int, int, int], ...]
    planes: tuple[Plane, ...]

    def bytes_at(self, rows: int, context: int) -> float:
        """Bytes that a decode step of `rows` sequences of `context` tokens reads."""
        total = float(self.dense + self.rows * rows)
        for size, count, chosen in self.experts:
            total += size / count * distinct(count, chosen, rows)
        return total + rows * sum(plane.bytes_at(context) for plane in self.planes)

    def operations(self, tokens: int, context: int) -> float:
        """Floating-point operations of `tokens` new tokens behind `context` earlier ones."""
        numbers = float(self.dense_numbers)
        for size, count, chosen in self.expert_numbers:
            numbers += size / count * chosen
        attention = sum(plane.operations(context) for plane in self.planes)
        return tokens * (2 * numbers + attention)


@dataclasses.dataclass(frozen=True)
class Plane:
    """A cache plane of one rank as a query sees it.

    Attributes:
      layers: how many layers read it.
      row: bytes of a row.
      width: numbers of a row that are multiplied with each query head.
      heads: query heads times the products each takes part in.
      stride: tokens a row stands for.
      most: rows at most (a window, or what an indexer chooses); None is no bound.
      twice: read and written at each step (recurrent states).
    """

    layers: int
    row: int
    width: int
    heads: int
    stride: int
    most: int | None
    twice: bool = False

    def rows_at(self, context: int) -> int:
        rows = -(-context // self.stride)
        return rows if self.most is None else min(rows, self.most)

    def bytes_at(self, context: int) -> float:
        return self.layers * self.row * self.rows_at(context) * (2 if self.twice else 1)

    def operations(self, context: int) -> float:
        return 2.0 * self.layers * self.rows_at(context) * self.width * self.heads


def distinct(count: int, chosen: int, rows: int) -> float:
    """Expected distinct experts of `count` when each of `rows` tokens chooses `chosen` evenly."""
    return count * (1 - (1 - chosen / count) ** rows)


def work(
    tree: declarations.Tree,
    weights: Any,
    planes: Mapping[str, caches.Declaration],
    values: Mapping[str, Any],
    ranks: int,
    dtype: str,
) -> Work:
    """One rank's work.

    Args:
      tree: the declarations over `ranks`; prediction layers ("draft") are left out.
      weights: the abstract parameters, by the same paths.
      planes: the declared caches.
      values: the checkpoint's config.json.
      dtype: of the caches.
    """
    values = values.get("text_config", values)
    chosen = int(values.get("num_experts_per_tok") or 1)
    leaves = dict(declarations.leaves_of(weights))
    tied = bool(values.get("tie_word_embeddings"))
    dense = rows = dense_numbers = 0
    experts: list[tuple[int, int, int]] = []
    expert_numbers: list[tuple[int, int, int]] = []
    for path, param in declarations.leaves(tree):
        if path.startswith("draft."):
            continue
        parts = shards(param, ranks)
        size = nbytes(leaves[path]) // parts
        numbers = math.prod(param.shape) // parts
        if param.experts is not None:
            experts.append((size, param.experts, chosen))
            expert_numbers.append((numbers, param.experts, chosen))
        elif path == "embed" and not tied:
            rows += size // max(param.dims[0].stored // parts, 1)
        else:
            dense += size
            dense_numbers += numbers if len(param.dims) > 1 else 0
    return Work(
        dense,
        tuple(experts),
        rows,
        dense_numbers,
        tuple(expert_numbers),
        tuple(_plane(name, plane, values, ranks, dtype) for name, plane in planes.items()),
    )


def _plane(
    name: str, plane: caches.Declaration, values: Mapping[str, Any], ranks: int, dtype: str
) -> Plane:
    shared = [d.stored // ranks if d.axis in ("kv_heads", "heads") else d.stored for d in plane.dims]
    item = jnp.dtype(dtype if plane.dtype == "cache" else plane.dtype).itemsize
    row, layers = math.prod(shared) * item, len(plane.layers)
    queries = -(-int(values.get("num_attention_heads") or 1) // ranks)
    # A key or value head is multiplied with its own queries, a latent row twice with all of them.
    heads = queries if any(d.axis == "kv_heads" for d in plane.dims) else 2 * queries
    if "index" in name:
        heads = int(values.get("index_n_heads") or values.get("indexer_n_heads") or 1)
    width = plane.dims[-1].stored
    match plane:
        case caches.Paged(stride=stride, reads=reads):
            return Plane(layers, row, width, heads, stride, reads)
        case caches.Ring(rows=rows):
            return Plane(layers, row, width, heads if rows > 32 else 0, 1, rows)
        case caches.State():
            return Plane(layers, row, math.prod(shared), 3, 1, 1, twice=True)


@dataclasses.dataclass(frozen=True)
class Time:
    """Seconds of one program, by cause. Of memory and arithmetic, which overlap, only the longer
    counts."""

    memory: float
    arithmetic: float
    launches: float
    collectives: float

    @property
    def total(self) -> float:
        return self.memory + self.arithmetic + self.launches + self.collectives

    @property
    def limit(self) -> str:
        """What takes most of it."""
        parts = dataclasses.asdict(self)
        return max(parts, key=lambda name: parts[name])

    def __add__(self, other: Time) -> Time:
        return Time(
            self.memory + other.memory,
            self.arithmetic + other.arithmetic,
            self.launches + other.launches,
            self.collectives + other.collectives,
        )


def _time(
    read: float, operations: float, counts: Counts, device: Device, ranks: int
) -> Time:
    memory = read / (device.read_gb_s * 1e9)
    arithmetic = operations / (device.bf16_tflops * 1e12)
    sizes = counts.collectives.items()
    return Time(
        memory=memory if memory >= arithmetic else 0.0,
        arithmetic=arithmetic if arithmetic > memory else 0.0,
        launches=counts.total * device.launch_us * 1e-6,
        collectives=sum(n * device.collective(ranks, size) for (_, size), n in sizes),
    )


def decode_time(
    work: Work, counts: Counts, device: Device, ranks: int, rows: int, context: int
) -> Time:
    """Seconds of a decode step of `rows` sequences that are `context` tokens long."""
    read, operations = work.bytes_at(rows, context), work.operations(rows, context)
    return _time(read, operations, counts, device, ranks)


def prefill_time(
    work: Work, counts: Counts, device: Device, ranks: int, tokens: int, tile: int
) -> Time:
    """Seconds of a cold prompt of `tokens` cut into tiles of `tile` (`counts` are a tile's)."""
    total = Time(0.0, 0.0, 0.0, 0.0)
    for start in range(0, tokens, tile):
        size = min(tile, tokens - start)
        read = float(work.dense + work.rows * size)
        read += sum(plane.bytes_at(start) for plane in work.planes)
        for stack, count, chosen in work.experts:
            read += stack / count * distinct(count, chosen, size)
        operations = work.operations(size, start + size // 2)
        total = total + _time(read, operations, counts, device, ranks)
    return total
