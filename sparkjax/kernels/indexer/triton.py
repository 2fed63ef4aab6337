"""The lightning indexer on a GPU: scores as matrix products, and an exact choice of the k best.

Scores of some queries are written out in float32 and read again by the choice. A score depends on
its query and key only: tiles are the same at any number of queries.

The choice finds the k-th largest score four bits of its (order-preserving) integer at a time:
each turn counts how many scores lie at or above each of 16 candidates. One more pass writes the
indices of what lies above, and of as many on the edge as are wanted, lowest first, to their places,
which are running counts.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .. import pallas as tools
from ..blocks import over_queries
from ..pallas import plgpu
from . import reference

KEYS = 64
"""Keys a block of threads scores."""
QUERY_ROWS = 64
"""For how many query heads it scores them (of several queries of a sequence)."""
RUN = 512
"""Scores a turn of the choice."""
FEW = 128
"""Below so many queries, XLA's own choice is faster: a query has but one block of threads here."""


def supports(q: Any, plane: Any) -> str | None:
    """None if `select` can take these, else the reason."""
    if reason := tools.types(q=q, plane=plane):
        return reason
    if q.shape[-1] % 16 or q.shape[-1] > 256:
        return f"{q.shape[-1]} channels; multiples of 16 up to 256 are supported"
    heads = q.shape[2]
    if heads & (heads - 1) or heads > QUERY_ROWS:
        return f"{heads} heads; powers of two up to {QUERY_ROWS} are supported"
    return None


def select(
    q: jax.Array,
    weights: jax.Array,
    plane: jax.Array,
    layer: Any,
    pages: jax.Array,
    limit: jax.Array,
    *,
    k: int,
    scale: float,
    interpret: bool = False,
) -> jax.Array:
    """int32 [B, Q, k]; arguments as in `reference.select`."""

    def block(q: jax.Array, weights: jax.Array, limit: jax.Array) -> jax.Array:
        found = scores(q, weights, plane, layer, pages, limit, scale=scale, interpret=interpret)
        return top_rows(found, limit, k, interpret=interpret)

    cost = q.shape[0] * pages.shape[1] * plane.shape[2]
    return over_queries(block, cost, q, weights, limit)


def scores(
    q: jax.Array,
    weights: jax.Array,
    plane: jax.Array,
    layer: Any,
    pages: jax.Array,
    limit: jax.Array,
    *,
    scale: float,
    interpret: bool = False,
) -> jax.Array:
    """float32 [B, Q, T * S]: `reference.index_scores` for the rows below `limit` (int32 [B, Q]),
    anything behind them."""
    b, count, heads, _ = q.shape
    rows = pages.shape[1] * plane.shape[2]
    queries = QUERY_ROWS // heads
    body = functools.partial(
        _scores, scale=scale, queries=queries, precision=tools.precision(jnp.float32, interpret)
    )
    run = tools.call(
        body,
        (-(-rows // KEYS), -(-count // queries), b),
        jax.ShapeDtypeStruct((b, count, rows), jnp.float32),
        warps=4,
        interpret=interpret,
        name="index_scores",
    )
    args = tools.scalar(layer), pages.astype(jnp.int32), limit.astype(jnp.int32)
    return run(*args, q, weights.astype(jnp.float32), plane)


def top_rows(found: jax.Array, limit: jax.Array, k: int, *, interpret: bool = False) -> jax.Array:
    """int32 [B, Q, k]: the k best of scores float32 [B, Q, N] below `limit` (int32 [B, Q]), in rising
    order of their index, then -1. A tie goes to the lower index; -inf is never taken."""
    b, count, rows = found.shape
    if b * count < FEW and k <= rows:
        seen = jnp.arange(rows, dtype=jnp.int32) < limit[..., None]
        return reference.top_rows(found, seen, k)
    run = tools.call(
        functools.partial(_top_rows, k=k),
        (b * count,),
        jax.ShapeDtypeStruct((b, count, k), jnp.int32),
        warps=4,
        interpret=interpret,
        name="top_rows",
    )
    return run(limit.astype(jnp.int32), found)


def head_scores(
    q: list[jax.Array], keys: list[jax.Array], weights: jax.Array, scale: float, precision: Any
) -> jax.Array:
    """w_h relu(scale q_h . k), [M, N], of parts of queries [M, part] and of keys [N, part]."""
    found = jnp.zeros((q[0].shape[0], keys[0].shape[0]), jnp.float32)
    for x, key in zip(q, keys, strict=True):
        if x.dtype != key.dtype:
            x, key = x.astype(jnp.float32), key.astype(jnp.float32)
        found += tools.dot(x, key.T, precision)
    return weights[:, None] * jnp.maximum(found * scale, 0.0)


def _scores(
    layer_ref: Any,
    pages_ref: Any,
    limit_ref: Any,
    q_ref: Any,
    weights_ref: Any,
    plane_ref: Any,
    out_ref: Any,
    *,
    scale: float,
    queries: int,
    precision: Any,
) -> None:
    tile, number, b = (pl.program_id(axis) for axis in range(3))
    _, count, heads, dim = q_ref.shape
    size = plane_ref.shape[2]
    offset = jnp.arange(queries, dtype=jnp.int32)
    query = number * queries + offset
    limits = plgpu.load(limit_ref.at[b, jnp.minimum(query, count - 1)])
    end = jnp.max(jnp.where(query < count, limits, 0))
    key = tile * KEYS + jnp.arange(KEYS, dtype=jnp.int32)

    @pl.when(tile * KEYS < end)
    def score() -> None:
        wanted = key < end
        index = jnp.where(wanted, key, 0)
        page = plgpu.load(pages_ref.at[b, jax.lax.div(index, jnp.int32(size))])
        inside = jax.lax.rem(index, jnp.int32(size))
        row = number * queries * heads + jnp.arange(queries * heads, dtype=jnp.int32)
        at = jnp.minimum(jax.lax.div(row, jnp.int32(heads)), count - 1)
        head = jax.lax.rem(row, jnp.int32(heads))
        q, keys = [], []
        for part in tools.parts(dim):
            place, channel = tools.cells(inside, part)
            mask = jnp.broadcast_to(wanted[:, None], (KEYS, part[1]))
            ref = plane_ref.at[layer_ref[0], page[:, None], place, channel]
            keys.append(plgpu.load(ref, mask=mask, other=0.0))
            q.append(plgpu.load(q_ref.at[b, at[:, None], head[:, None], channel]))
        weights = plgpu.load(weights_ref.at[b, at, head])
        found = head_scores(q, keys, weights, scale, precision)
        found = jnp.sum(found.reshape(queries, heads, KEYS), axis=1)
        # A query that is not there lies out of range and is not written.
        mask = jnp.broadcast_to((query < count)[:, None] & wanted[None, :], found.shape)
        plgpu.store(out_ref.at[b, query[:, None], key[None, :]], found, mask=mask)


def _ordered(score: jax.Array) -> jax.Array:
    """uint32 that rises with a float32 score; both zeros are one."""
    bits = jax.lax.bitcast_convert_type(jnp.where(score == 0.0, 0.0, score), jnp.int32)
    least = jnp.int32(-(2**31))
    return jnp.where(bits < 0, ~bits, bits ^ least).astype(jnp.uint32)


NOTHING = 0x007FFFFF
"""`_ordered` of -inf."""


def _top_rows(limit_ref: Any, scores_ref: Any, out_ref: Any, *, k: int) -> None:
    _, count, rows = scores_ref.shape
    number = pl.program_id(0)
    b, i = jax.lax.div(number, jnp.int32(count)), jax.lax.rem(number, jnp.int32(count))
    end = jnp.minimum(limit_ref[b, i], rows)
    turns = jax.lax.div(end + (RUN - 1), jnp.int32(RUN))
    offsets = jnp.arange(RUN, dtype=jnp.int32)

    def keys(turn: jax.Array) -> tuple[jax.Array, jax.Array]:
        index = turn * RUN + offsets
        there = index < end
        ref = scores_ref.at[b, i, jnp.minimum(index, rows - 1)]
        key = _ordered(plgpu.load(ref, mask=there, other=-jnp.inf))
        return index, jnp.where(there, key, jnp.uint32(0))

    def valid(turn: jax.Array, total: jax.Array) -> jax.Array:
        return total + (keys(turn)[1] > NOTHING).astype(jnp.int32)

    some = jnp.sum(jax.lax.fori_loop(0, turns, valid, jnp.zeros((RUN,), jnp.int32)))
    digits = jnp.arange(16, dtype=jnp.uint32)

    def narrow(step: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        edge, above = state
        shift = (28 - 4 * step).astype(jnp.uint32)
        candidates = edge | (digits << shift)

        def tally(turn: jax.Array, total: jax.Array) -> jax.Array:
            key = keys(turn)[1]
            return total + (key[:, None] >= candidates[None, :]).astype(jnp.int32)

        totals = jax.lax.fori_loop(0, turns, tally, jnp.zeros((RUN, 16), jnp.int32))
        at_least = jnp.sum(totals, axis=0)
        digit = jnp.max(jnp.where(at_least >= k, digits.astype(jnp.int32), 0))
        more = jnp.sum(jnp.where(digits.astype(jnp.int32) == digit + 1, at_least, 0))
        edge = edge | (digit.astype(jnp.uint32) << shift)
        return edge, jnp.where(digit < 15, more, above)

    # Where no more are there than are wanted, all of them lie above "nothing".
    search = some > k
    state = (
        jnp.where(search, jnp.uint32(0), jnp.uint32(NOTHING)),
        jnp.where(search, jnp.int32(0), jnp.int32(k)),
    )
    edge, above = jax.lax.fori_loop(0, jnp.where(search, jnp.int32(8), jnp.int32(0)), narrow, state)
    ties = k - above

    def write(turn: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        taken, on_edge = state
        index, key = keys(turn)
        on = (key == edge).astype(jnp.int32)
        take = (key > edge) | ((on > 0) & (on_edge + jnp.cumsum(on) <= ties))
        one = take.astype(jnp.int32)
        place = jnp.where(take, taken + jnp.cumsum(one) - 1, k)
        plgpu.store(out_ref.at[b, i, place], index, mask=take)
        return taken + jnp.sum(one), on_edge + jnp.sum(on)

    taken, _ = jax.lax.fori_loop(0, turns, write, (jnp.int32(0), jnp.int32(0)))

    def clear(turn: jax.Array, nothing: jax.Array) -> jax.Array:
        place = turn * RUN + offsets
        rest = (place >= taken) & (place < k)
        plgpu.store(
            out_ref.at[b, i, jnp.where(rest, place, k)], jnp.full((RUN,), -1, jnp.int32), mask=rest
        )
        return nothing

    jax.lax.fori_loop(jax.lax.div(taken, jnp.int32(RUN)), -(-k // RUN), clear, jnp.int32(0))
