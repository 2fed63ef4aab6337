"""Attention of each query to rows chosen for it, on a GPU: latent rows, or keys and values.

A block of threads takes some heads of one query, so that the chosen rows are loaded once for all
of them, and walks over blocks of rows with an online softmax: first those that a sequence's queries
share, as far as any is seen, then the chosen ones through the page table. With few queries, rows are
cut into spans of a fixed number, each a block of threads, and a second kernel joins them.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .. import online
from .. import pallas as tools
from ..pallas import plgpu

SPAN = PICKED = 128
"""Shared and chosen rows a span: few, so that a single query's are read by many blocks of threads."""
FEW = 16
"""Up to so many queries a row (decode, verification) run a block of threads a span. The number of
rows must not decide: it would change bits."""


@dataclasses.dataclass(frozen=True)
class Form:
    """What a kernel knows when it is compiled.

    Attributes:
      heads: query heads of a key head; `tile` of them a block of threads.
      block: rows a turn.
      dense, chosen: how many shared rows there are, and chosen ones a query (0: none).
      latent: a row is key and value at once.
      sinks: whether there are any.
      fine: of `online.add`.
    """

    scale: float
    value_dim: int
    heads: int
    tile: int
    block: int
    dense: int
    chosen: int
    latent: bool
    sinks: bool
    precision: Any
    fine: bool

    @property
    def dense_blocks(self) -> int:
        return -(-self.dense // self.block)

    @property
    def chosen_blocks(self) -> int:
        return -(-self.chosen // self.block)

    @property
    def dense_spans(self) -> int:
        return -(-self.dense_blocks * self.block // SPAN)

    @property
    def spans(self) -> int:
        """Those of shared rows, then those of chosen ones, which begin anew: how many rows are shared
        must not move them."""
        return self.dense_spans - (-self.chosen_blocks * self.block // PICKED)


def supports(q: Any, plane: Any, value_dim: int) -> str | None:
    """None if `latent_attention` can take these, else the reason."""
    if reason := tools.types(q=q, plane=plane):
        return reason
    if q.dtype == jnp.float32 and q.shape[-1] > 256:
        return f"{q.shape[-1]} channels of float32; up to 256 are supported"
    return fits(q.shape[-1], value_dim)


def fits(dim: int, value_dim: int) -> str | None:
    """None if rows of `dim` channels that begin with `value_dim` of a value can be taken."""
    if dim % 16 or value_dim % 16 or dim > 1024:
        return f"{dim} and {value_dim} channels; multiples of 16 up to 1024 are supported"
    values = tools.parts(value_dim)
    if tools.parts(dim)[: len(values)] != values:
        return f"a value of {value_dim} channels does not end where a power of two of {dim} does"
    return None


def latent_attention(
    q: jax.Array,
    *,
    scale: float,
    value_dim: int,
    rows: jax.Array | None = None,
    seen: jax.Array | None = None,
    plane: jax.Array | None = None,
    layer: Any = None,
    pages: jax.Array | None = None,
    selected: jax.Array | None = None,
    sinks: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """[B, Q, heads, value_dim]; arguments as in `reference.latent_attention`."""
    shared = () if rows is None or seen is None else (rows, seen.astype(jnp.int8))
    chosen = () if plane is None or selected is None else (plane[..., None, :],)
    return attend(
        q, shared, chosen, layer, pages, selected if chosen else None, sinks,
        scale=scale, value_dim=value_dim, interpret=interpret,
    )  # fmt: skip


def attend(
    q: jax.Array,
    shared: tuple[jax.Array, ...],
    planes: tuple[jax.Array, ...],
    layer: Any,
    pages: jax.Array | None,
    selected: jax.Array | None,
    sinks: jax.Array | None,
    *,
    scale: float,
    value_dim: int,
    tile: int | None = None,
    block: int | None = None,
    warps: int | None = None,
    stages: int | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Attention to shared rows and to chosen ones.

    Args:
      q: [B, Q, Hq, D].
      shared: () or (rows [B, N, D], seen int8 [B, Q, N]).
      planes: () or one plane [L, P, S, 1, D] of latent rows or two [L, P, S, Hk, D], [.., Dv] of
        keys and values.
      selected: int32 [B, Q, K] where there are planes.
      tile, block, warps, stages: heads and rows at a time, and how they are run (measured defaults).

    Returns:
      [B, Q, Hq, value_dim] in q's dtype.
    """
    b, count, all_heads, _ = q.shape
    kv_heads = planes[0].shape[3] if planes else 1
    full = q.dtype == jnp.float32
    heads = all_heads // kv_heads
    form = Form(
        scale=scale,
        value_dim=value_dim,
        heads=heads,
        # A span's results are as many numbers as what it reads: of 32 heads, joining has no room.
        tile=tile or min(tools.power(heads, 16), 16 if full or count <= FEW else 32),
        block=block or (16 if full else 32),
        dense=shared[0].shape[1] if shared else 0,
        chosen=selected.shape[2] if selected is not None else 0,
        latent=len(planes) < 2,
        sinks=sinks is not None,
        precision=tools.precision(jnp.float32, interpret),
        fine=count <= FEW,
    )
    tiles = -(-heads // form.tile)
    picks = (
        ()
        if selected is None or pages is None
        else (pages.astype(jnp.int32), selected.astype(jnp.int32), *planes)
    )
    extra = () if sinks is None else (sinks.astype(jnp.float32),)
    args = (tools.scalar(0 if layer is None else layer), q, *shared, *picks)
    out = jax.ShapeDtypeStruct((b, count, all_heads, value_dim), q.dtype)
    call = functools.partial(tools.call, warps=warps or 4, interpret=interpret)
    stages = stages or (1 if full else 2 if form.tile > 16 else 3)
    if count > FEW:
        body = functools.partial(_many, form=form)
        run = call(body, (b * count, tiles, kv_heads), out, stages=stages, name="sparse_many")
        return run(*args, *extra)
    partial = (b, count, kv_heads, form.spans, tiles * form.tile)
    shapes = (
        jax.ShapeDtypeStruct(partial, jnp.float32),
        jax.ShapeDtypeStruct(partial, jnp.float32),
        jax.ShapeDtypeStruct((*partial, value_dim), jnp.float32),
    )
    body = functools.partial(_few, form=form)
    grid = (b * count, tiles * form.spans, kv_heads)
    found = call(body, grid, shapes, stages=stages, name="sparse_few")(*args)
    run = call(
        functools.partial(_join, form=form), (b * count, tiles, kv_heads), out, name="sparse_join"
    )
    return run(*found, *extra)


@dataclasses.dataclass(frozen=True)
class _Place:
    """Which heads of which query a block of threads takes."""

    row: Any
    query: Any
    kv_head: Any
    head: jax.Array
    there: jax.Array

    @staticmethod
    def of(count: int, tile: Any, form: Form) -> _Place:
        number = pl.program_id(0)
        inside = tile * form.tile + jnp.arange(form.tile, dtype=jnp.int32)
        kv_head = pl.program_id(2)
        return _Place(
            jax.lax.div(number, jnp.int32(count)),
            jax.lax.rem(number, jnp.int32(count)),
            kv_head,
            kv_head * form.heads + inside,
            inside < form.heads,
        )


def _load(ref: Any, rows: jax.Array, part: tuple[int, int]) -> jax.Array:
    """[R, part] of a ref; zeros in rows that are not wanted."""
    return plgpu.load(ref, mask=jnp.broadcast_to(rows[:, None], (*rows.shape, part[1])), other=0.0)


def _span(span: Any, place: _Place, refs: tuple, form: Form) -> online.Partial:
    """Attention to one span of the rows (None: to all)."""
    layer_ref, q_ref, *rest = refs
    row, query = place.row, place.query
    dim = q_ref.shape[3]
    dtype = q_ref.dtype
    q = []
    for part in tools.parts(dim):
        head, channel = tools.cells(place.head, part)
        q.append(_load(q_ref.at[row, query, head, channel], place.there, part))
    offsets = jnp.arange(form.block, dtype=jnp.int32)

    def add(found: online.Partial, seen: jax.Array, keys: list, values: list) -> online.Partial:
        logits = jnp.zeros((form.tile, form.block), jnp.float32)
        for x, key in zip(q, keys, strict=True):
            logits += tools.dot(x, key.T, form.precision)
        mask = jnp.broadcast_to(seen[None, :], logits.shape)
        return online.add(
            found, logits * (form.scale * online.LOG2E), mask, values, form.precision, form.fine
        )

    def some(seen: jax.Array, load: Any, found: online.Partial) -> online.Partial:
        """With the rows of a block, unless none of them is seen."""
        return jax.lax.cond(jnp.max(seen.astype(jnp.int32)) > 0, load, lambda x: x, found)

    def blocks(before: int, count: int, size: int) -> tuple[jax.Array, jax.Array]:
        """First and end of this span's blocks, of `count` that begin with span number `before` and
        stand in spans of `size` rows."""
        if span is None:
            return jnp.int32(0), jnp.int32(count)
        each = size // form.block
        first = (span - before) * each
        return jnp.maximum(first, 0), jnp.clip(first + each, 0, count)

    found = online.start(form.tile, form.value_dim)
    if form.dense:
        rows_ref, seen_ref, *rest = rest

        def dense(number: jax.Array, found: online.Partial) -> online.Partial:
            index = number * form.block + offsets
            inside = index < form.dense
            index = jnp.minimum(index, form.dense - 1)
            seen = (plgpu.load(seen_ref.at[row, query, index]) != 0) & inside

            def load(found: online.Partial) -> online.Partial:
                keys = []
                for part in tools.parts(dim):
                    at, channel = tools.cells(index, part)
                    keys.append(_load(rows_ref.at[row, at, channel], seen, part).astype(dtype))
                return add(found, seen, keys, keys[: len(found[2])])

            return some(seen, load, found)

        found = jax.lax.fori_loop(*blocks(0, form.dense_blocks, SPAN), dense, found)
    if form.chosen:
        pages_ref, selected_ref, *planes = rest
        layer, size = layer_ref[0], planes[0].shape[2]

        def chosen(number: jax.Array, found: online.Partial) -> online.Partial:
            pick = number * form.block + offsets
            index = plgpu.load(selected_ref.at[row, query, jnp.minimum(pick, form.chosen - 1)])
            seen = (index >= 0) & (pick < form.chosen)
            index = jnp.where(seen, index, 0)
            page = plgpu.load(pages_ref.at[row, jax.lax.div(index, jnp.int32(size))])
            inside = jax.lax.rem(index, jnp.int32(size))

            def rows(plane: Any, part: tuple[int, int]) -> jax.Array:
                at, channel = tools.cells(inside, part)
                ref = plane.at[layer, page[:, None], at, place.kv_head, channel]
                return _load(ref, seen, part).astype(dtype)

            def load(found: online.Partial) -> online.Partial:
                keys = [rows(planes[0], part) for part in tools.parts(dim)]
                if form.latent:
                    return add(found, seen, keys, keys[: len(found[2])])
                values = [rows(planes[1], part) for part in tools.parts(form.value_dim)]
                return add(found, seen, keys, values)

            return load(found)

        bounds = blocks(form.dense_spans, form.chosen_blocks, PICKED)
        found = jax.lax.fori_loop(*bounds, chosen, found)
    return found


def _store(found: online.Partial, place: _Place, sinks: tuple, out: Any, form: Form) -> None:
    sink = None
    if sinks:
        sink = plgpu.load(sinks[0].at[jnp.minimum(place.head, sinks[0].shape[0] - 1)])
    # Heads that are not there are another key head's, or none's: out of range, so not written.
    heads = jnp.where(place.there, place.head, out.shape[2])
    for part, value in zip(tools.parts(form.value_dim), online.finish(found, sink), strict=True):
        head, channel = tools.cells(heads, part)
        mask = jnp.broadcast_to(place.there[:, None], value.shape)
        ref = out.at[place.row, place.query, head, channel]
        plgpu.store(ref, value.astype(out.dtype), mask=mask)


def _many(*refs: Any, form: Form) -> None:
    *refs_in, out = refs
    sources, sinks = (refs_in[:-1], refs_in[-1:]) if form.sinks else (refs_in, [])
    place = _Place.of(out.shape[1], pl.program_id(1), form)

    _store(_span(None, place, tuple(sources), form), place, tuple(sinks), out, form)


def _few(*refs: Any, form: Form) -> None:
    *sources, top_ref, total_ref, values_ref = refs
    number = pl.program_id(1)
    span, tile = (
        jax.lax.rem(number, jnp.int32(form.spans)),
        jax.lax.div(number, jnp.int32(form.spans)),
    )
    place = _Place.of(top_ref.shape[1], tile, form)
    top, total, values = _span(span, place, tuple(sources), form)
    rows = pl.ds(tile * form.tile, form.tile)
    at = place.row, place.query, place.kv_head, span, rows
    top_ref[at] = top
    total_ref[at] = total
    for part, value in zip(tools.parts(form.value_dim), values, strict=True):
        mask = jnp.broadcast_to((total > 0.0)[:, None], value.shape)
        plgpu.store(values_ref.at[(*at, pl.ds(*part))], value, mask=mask)


def _join(top_ref: Any, total_ref: Any, values_ref: Any, *refs: Any, form: Form) -> None:
    *sinks, out = refs
    tile = pl.program_id(1)
    place = _Place.of(out.shape[1], tile, form)
    rows = pl.ds(tile * form.tile, form.tile)

    at = place.row, place.query, place.kv_head

    def load(span: int, part: tuple[int, int], wanted: jax.Array) -> jax.Array:
        ref = values_ref.at[(*at, jnp.int32(span), rows, pl.ds(*part))]
        return _load(ref, wanted, part)

    tops, totals = (
        [ref[(*at, span, rows)] for span in range(form.spans)] for ref in (top_ref, total_ref)
    )
    found = online.join(tops, totals, load, form.value_dim)
    _store(found, place, tuple(sinks), out, form)
