"""Grouped-query attention over pages and over rings on a GPU.

The online softmax (`kernels.online`) takes keys in blocks at absolute positions. A query's keys are
cut into at most `SPLITS` spans, whose results are joined in order. Where a span begins and ends
follows from the query's own position, so its result has the same bits in any batch.

Few queries (decode, verification) run a block of threads a span, and a second kernel joins them
(Dao et al. 2023, "Flash-Decoding"); many (prefill) run one a tile of queries, with one span.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .. import online
from .. import pallas as tools
from ..pallas import plgpu

SPLITS = 16
SPAN = 256
"""Fewest keys a span."""
FEW = 16
"""Up to so many queries a row are taken as decode."""

Part = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Form:
    """What a kernel knows when it is compiled.

    Attributes:
      scale, window, softcap: as in the reference.
      group: query heads a key head.
      rows: queries x group in a tile; `block` keys a turn.
      ring: keys come from a ring and from the new tokens, not from pages.
      sinks: whether there are any.
      fine: of `online.add`: decode waits for memory and has the time.
    """

    scale: float
    window: int
    softcap: float
    group: int
    rows: int
    block: int
    ring: bool
    sinks: bool
    precision: Any
    fine: bool

    @property
    def span(self) -> int:
        """Keys a span under a window."""
        return max(SPAN, tools.power(self.window) // SPLITS)

    @property
    def splits(self) -> int:
        return min(SPLITS, -(-self.window // self.span) + 1) if self.window else SPLITS


def supports(q: Any, k: Any, v: Any) -> str | None:
    """None if these can be taken (`k` and `v`: the planes), else the reason."""
    if reason := tools.types(q=q, k=k, v=v):
        return reason
    if q.shape[3] != k.shape[4] or q.shape[2] % k.shape[3]:
        return f"heads do not fit: q {q.shape}, k {k.shape}"
    for name, size in (("key", k.shape[4]), ("value", v.shape[4])):
        if size % 16 or size > 512:
            return f"{size} channels a {name} head; multiples of 16 up to 512 are supported"
    return None


def paged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    layer: Any,
    pages: jax.Array,
    start: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """[B, Q, Hq, Dv]; arguments as in `reference.paged_attention`."""
    settings: dict[str, Any] = {
        "scale": scale,
        "window": window,
        "softcap": softcap,
        "interpret": interpret,
    }
    return _attention(
        q, (k, v), (k, v), layer, pages, start, lengths, sinks, ring=False, **settings
    )


def ring_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    ring_k: jax.Array,
    ring_v: jax.Array,
    layer: Any,
    slots: jax.Array,
    start: jax.Array,
    lengths: jax.Array,
    *,
    window: int,
    scale: float,
    softcap: float = 0.0,
    sinks: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """[B, Q, Hq, Dv]; arguments as in `reference.ring_attention_cached`."""
    settings: dict[str, Any] = {
        "scale": scale,
        "window": window,
        "softcap": softcap,
        "interpret": interpret,
    }
    planes = (ring_k, ring_v)
    return _attention(
        q, planes, (k, v, *planes), layer, slots, start, lengths, sinks, ring=True, **settings
    )


def _attention(
    q: jax.Array,
    planes: tuple[jax.Array, jax.Array],
    sources: tuple[jax.Array, ...],
    layer: Any,
    table: jax.Array,
    start: jax.Array,
    lengths: jax.Array,
    sinks: jax.Array | None,
    *,
    scale: float,
    window: int,
    softcap: float,
    ring: bool,
    block: int | None = None,
    rows: int | None = None,
    warps: int = 4,
    stages: int | None = None,
    interpret: bool = False,
) -> jax.Array:
    b, count, heads, dim = q.shape
    kv_heads, dim_v = planes[0].shape[3], planes[1].shape[4]
    group = heads // kv_heads
    few = count <= FEW
    full = q.dtype == jnp.float32
    wide = max(dim, dim_v) > 128 or full
    huge = max(dim, dim_v) > 128 and full
    if rows is None:
        tile = 32 if count * group > 16 else 16
        rows = 16 if huge else tile if few else 32 if wide else 64
    form = Form(
        scale=scale,
        window=window,
        softcap=softcap,
        group=group,
        rows=rows,
        block=block or (16 if huge else 32 if wide or ring else 64),
        ring=ring,
        sinks=sinks is not None,
        precision=tools.precision(jnp.float32, interpret),
        fine=few,
    )
    tiles = -(-count * group // form.rows)
    ints = (tools.scalar(layer), *(x.astype(jnp.int32) for x in (table, start, lengths)))
    extra = () if sinks is None else (sinks.astype(jnp.float32),)
    out = jax.ShapeDtypeStruct((*q.shape[:3], dim_v), q.dtype)
    call = functools.partial(tools.call, warps=warps, interpret=interpret)
    # What is loaded ahead lies in shared memory; a ring's blocks are loaded from two places.
    stages = stages or (1 if full else 2)
    if not few:
        body = functools.partial(_many, form=form)
        run = call(body, (tiles, kv_heads, b), out, stages=stages, name="attention_prefill")
        return run(*ints, q, *sources, *extra)
    partial = (b, kv_heads, form.splits, tiles * form.rows)
    shapes = (
        jax.ShapeDtypeStruct(partial, jnp.float32),
        jax.ShapeDtypeStruct(partial, jnp.float32),
        jax.ShapeDtypeStruct((*partial, dim_v), jnp.float32),
    )
    grid = (form.splits * tiles, kv_heads, b)
    body = functools.partial(_few, form=form)
    run = call(body, grid, shapes, stages=stages, name="attention_decode")
    found = run(*ints, q, *sources)
    body = functools.partial(_join, form=form)
    run = call(body, (tiles, kv_heads, b), out, name="attention_join")
    return run(ints[2], ints[3], *found, *extra)


@dataclasses.dataclass(frozen=True)
class _Tile:
    """Rows of a tile: query i of head `head`, at `position`, `real` where it is there."""

    query: jax.Array
    head: jax.Array
    position: jax.Array
    real: jax.Array


def _tile(number: Any, kv_head: Any, start: jax.Array, length: jax.Array, form: Form) -> _Tile:
    row = number * form.rows + jnp.arange(form.rows, dtype=jnp.int32)
    query = jax.lax.div(row, jnp.int32(form.group))
    head = kv_head * form.group + jax.lax.rem(row, jnp.int32(form.group))
    return _Tile(query, head, start + query, query < length)


def _bounds(split: Any, position: jax.Array, form: Form) -> tuple[jax.Array, jax.Array]:
    """First key and end of a query's span number `split` (None: of all its keys); empty where the
    end is not behind it."""
    if split is None:
        return jnp.maximum(
            position - (form.window or jnp.iinfo(jnp.int32).max) + 1, 0
        ), position + 1
    if form.window:
        first = jnp.maximum(position - (form.window - 1), 0)
        low = jax.lax.div(first, jnp.int32(form.span)) * form.span + split * form.span
        high = low + form.span
        return jnp.maximum(low, first), jnp.minimum(high, position + 1)
    filled = position
    for shift in (1, 2, 4, 8, 16):
        filled = filled | jax.lax.shift_right_logical(filled, jnp.int32(shift))
    span = jnp.maximum(jax.lax.div(filled, jnp.int32(SPLITS)) + 1, SPAN)
    return split * span, jnp.minimum((split + 1) * span, position + 1)


def _sources(refs: tuple, layer: jax.Array, row: Any, kv_head: Any, start: jax.Array, form: Form):
    """(locate, fetch): `locate(first)` finds the block of keys from position `first` on, and
    `fetch(where, which, part, wanted)` loads its keys (0) or values (1): [block, part]."""
    offsets = jnp.arange(form.block, dtype=jnp.int32)
    if form.ring:
        table, *sources = refs
        slot, size = table[row], sources[2].shape[2]

        def locate(first: jax.Array) -> Any:
            return first + offsets

        def fetch(key: Any, which: int, part: Part, wanted: jax.Array) -> jax.Array:
            new, ring = sources[which], sources[2 + which]
            old = wanted & (key < start)
            place, channel = tools.cells(jax.lax.rem(key, jnp.int32(size)), part)
            kept = _load(ring.at[layer, slot, place, kv_head, channel], old, part)
            index, _ = tools.cells(jnp.clip(key - start, 0, new.shape[1] - 1), part)
            given = _load(new.at[row, index, kv_head, channel], wanted & (key >= start), part)
            return jnp.where(old[:, None], kept.astype(given.dtype), given)

        return locate, fetch
    pages, *planes = refs
    size = planes[0].shape[2]
    whole = size % form.block == 0

    def locate_page(first: jax.Array) -> Any:
        if whole:
            page = pages[row, jax.lax.div(first, jnp.int32(size))]
            return page, jax.lax.rem(first, jnp.int32(size)) + offsets
        key = first + offsets
        number = jnp.minimum(jax.lax.div(key, jnp.int32(size)), pages.shape[1] - 1)
        return plgpu.load(pages.at[row, number]), jax.lax.rem(key, jnp.int32(size))

    def fetch_page(where: Any, which: int, part: Part, wanted: jax.Array) -> jax.Array:
        page, offset = where
        row, channel = tools.cells(offset, part)
        if not whole:
            page = page[:, None]
        return _load(planes[which].at[layer, page, row, kv_head, channel], wanted, part)

    return locate_page, fetch_page


def _load(ref: Any, rows: jax.Array, part: Part) -> jax.Array:
    """[R, part] of a ref; zeros in rows that are not wanted."""
    return plgpu.load(ref, mask=jnp.broadcast_to(rows[:, None], (*rows.shape, part[1])), other=0.0)


def _span(
    split: Any, tile: _Tile, q: list, locate: Callable, fetch: Callable, dim_v: int, form: Form
) -> online.Partial:
    """Attention of a tile's queries to one span of their keys."""
    low, high = _bounds(split, tile.position, form)
    low = jnp.where(tile.real, low, jnp.iinfo(jnp.int32).max)
    high = jnp.where(tile.real, high, 0)
    begin, end = jnp.min(low), jnp.max(high)
    block = jnp.int32(form.block)

    def turn(number: jax.Array, found: online.Partial) -> online.Partial:
        key = number * block + jnp.arange(form.block, dtype=jnp.int32)
        wanted = (key >= begin) & (key < end)
        where = locate(number * block)
        dtype = q[0][1].dtype
        logits = jnp.zeros((form.rows, form.block), jnp.float32)
        for part, x in q:
            rows = fetch(where, 0, part, wanted).astype(dtype)
            logits += tools.dot(x, rows.T, form.precision)
        logits = logits * form.scale
        if form.softcap:
            logits = form.softcap * jnp.tanh(logits / form.softcap)
        seen = (key[None, :] >= low[:, None]) & (key[None, :] < high[:, None])
        values = [fetch(where, 1, part, wanted).astype(dtype) for part in tools.parts(dim_v)]
        return online.add(found, logits * online.LOG2E, seen, values, form.precision, form.fine)

    turns = jax.lax.div(end + block - 1, block)
    return jax.lax.fori_loop(jax.lax.div(begin, block), turns, turn, online.start(form.rows, dim_v))


def _finish(found: online.Partial, tile: _Tile, sinks: tuple, out: Any, row: Any) -> None:
    sink = None
    if sinks:
        sink = plgpu.load(sinks[0].at[jnp.minimum(tile.head, sinks[0].shape[0] - 1)])
    there = tile.query < out.shape[1]
    for part, value in zip(tools.parts(out.shape[3]), online.finish(found, sink), strict=True):
        value = jnp.where(tile.real[:, None], value, 0.0).astype(out.dtype)
        index, channel = tools.cells(tile.query, part)
        mask = jnp.broadcast_to(there[:, None], value.shape)
        plgpu.store(out.at[row, index, tile.head[:, None], channel], value, mask=mask)


def _queries(q_ref: Any, row: Any, tile: _Tile) -> list:
    query = jnp.minimum(tile.query, q_ref.shape[1] - 1)
    found = []
    for part in tools.parts(q_ref.shape[3]):
        index, channel = tools.cells(query, part)
        found.append((part, plgpu.load(q_ref.at[row, index, tile.head[:, None], channel])))
    return found


def _many(
    layer_ref: Any, table: Any, start_ref: Any, lengths_ref: Any, q_ref: Any, *refs: Any, form: Form
) -> None:
    *given, out = refs
    sources, sinks = (given[:-1], given[-1:]) if form.sinks else (given, [])
    number, kv_head, row = (pl.program_id(axis) for axis in range(3))
    start, length = start_ref[row], lengths_ref[row]
    tile = _tile(number, kv_head, start, length, form)
    dim_v = out.shape[3]
    q = _queries(q_ref, row, tile)
    locate, fetch = _sources((table, *sources), layer_ref[0], row, kv_head, start, form)

    found = _span(None, tile, q, locate, fetch, dim_v, form)
    _finish(found, tile, tuple(sinks), out, row)


def _few(
    layer_ref: Any, table: Any, start_ref: Any, lengths_ref: Any, q_ref: Any, *refs: Any, form: Form
) -> None:
    *sources, top_ref, total_ref, values_ref = refs
    number, kv_head, row = (pl.program_id(axis) for axis in range(3))
    split = jax.lax.rem(number, jnp.int32(form.splits))
    at = jax.lax.div(number, jnp.int32(form.splits))
    start, length = start_ref[row], lengths_ref[row]
    tile = _tile(at, kv_head, start, length, form)
    dim_v = values_ref.shape[4]
    q = _queries(q_ref, row, tile)
    locate, fetch = _sources((table, *sources), layer_ref[0], row, kv_head, start, form)
    top, total, values = _span(split, tile, q, locate, fetch, dim_v, form)
    rows = pl.ds(at * form.rows, form.rows)
    top_ref[row, kv_head, split, rows] = top
    total_ref[row, kv_head, split, rows] = total
    for part, value in zip(tools.parts(dim_v), values, strict=True):
        mask = jnp.broadcast_to((total > 0.0)[:, None], value.shape)
        ref = values_ref.at[row, kv_head, split, rows, pl.ds(*part)]
        plgpu.store(ref, value, mask=mask)


def _join(
    start_ref: Any,
    lengths_ref: Any,
    top_ref: Any,
    total_ref: Any,
    values_ref: Any,
    *refs: Any,
    form: Form,
) -> None:
    *sinks, out = refs
    number, kv_head, row = (pl.program_id(axis) for axis in range(3))
    tile = _tile(number, kv_head, start_ref[row], lengths_ref[row], form)
    rows = pl.ds(number * form.rows, form.rows)

    def load(split: int, part: Part, wanted: jax.Array) -> jax.Array:
        ref = values_ref.at[row, kv_head, jnp.int32(split), rows, pl.ds(*part)]
        return _load(ref, wanted, part)

    tops, totals = (
        [ref[row, kv_head, split, rows] for split in range(form.splits)]
        for ref in (top_ref, total_ref)
    )
    _finish(online.join(tops, totals, load, out.shape[3]), tile, tuple(sinks), out, row)
