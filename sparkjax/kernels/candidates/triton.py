"""The two-level indexer on a GPU, from the indexer's scores and its choice of the k best."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .. import pallas as tools
from ..blocks import over_queries
from ..indexer import triton as indexer
from ..pallas import plgpu

supports = indexer.supports


def pick_blocks(
    q: jax.Array,
    weights: jax.Array,
    plane: jax.Array,
    layer: Any,
    pages: jax.Array,
    limit: jax.Array,
    *,
    k: int,
    size: int,
    scale: float,
    interpret: bool = False,
) -> jax.Array:
    """int32 [B, Q, k]; arguments as in `reference.pick_blocks`."""
    rows = pages.shape[1] * plane.shape[2]
    count = -(-rows // size)

    def block(q: jax.Array, weights: jax.Array, limit: jax.Array) -> jax.Array:
        found = indexer.scores(
            q, weights, plane, layer, pages, limit, scale=scale, interpret=interpret
        )
        found = jnp.where(jnp.arange(rows) < limit[..., None], found, -jnp.inf)
        pad = [(0, 0), (0, 0), (0, count * size - rows)]
        found = jnp.pad(found, pad, constant_values=-jnp.inf)
        best = found.reshape(*found.shape[:2], count, size).max(-1)
        newest = jnp.arange(count) == (limit[..., None] - 1) // size
        best = jnp.where(newest, jnp.inf, best)
        return indexer.top_rows(best, -(-limit // size), k, interpret=interpret)

    return over_queries(block, q.shape[0] * rows, q, weights, limit)


def select_within(
    q: jax.Array,
    weights: jax.Array,
    plane: jax.Array,
    layer: Any,
    pages: jax.Array,
    limit: jax.Array,
    blocks: jax.Array,
    *,
    k: int,
    size: int,
    scale: float,
    interpret: bool = False,
) -> jax.Array:
    """int32 [B, Q, k]; arguments as in `reference.select_within`."""
    rows = blocks.shape[-1] * size

    def block(q: jax.Array, weights: jax.Array, limit: jax.Array, blocks: jax.Array) -> jax.Array:
        b, count = blocks.shape[:2]
        body = functools.partial(
            _scores_within,
            scale=scale,
            size=size,
            precision=tools.precision(jnp.float32, interpret),
        )
        run = tools.call(
            body,
            (-(-rows // indexer.KEYS), b * count),
            jax.ShapeDtypeStruct((b, count, rows), jnp.float32),
            warps=4,
            interpret=interpret,
            name="index_scores_within",
        )
        ints = (x.astype(jnp.int32) for x in (pages, limit, blocks))
        found = run(tools.scalar(layer), *ints, q, weights.astype(jnp.float32), plane)
        best = indexer.top_rows(found, jnp.full((b, count), rows), k, interpret=interpret)
        index = jnp.where(blocks[..., None] < 0, -1, blocks[..., None] * size + jnp.arange(size))
        chosen = jnp.take_along_axis(index.reshape(b, count, rows), jnp.maximum(best, 0), axis=-1)
        return jnp.where(best < 0, -1, chosen.astype(jnp.int32))

    return over_queries(block, q.shape[0] * rows, q, weights, limit, blocks)


def _scores_within(
    layer_ref: Any,
    pages_ref: Any,
    limit_ref: Any,
    blocks_ref: Any,
    q_ref: Any,
    weights_ref: Any,
    plane_ref: Any,
    out_ref: Any,
    *,
    scale: float,
    size: int,
    precision: Any,
) -> None:
    tile, number = pl.program_id(0), pl.program_id(1)
    _, count, heads, dim = q_ref.shape
    _, _, rows = out_ref.shape
    page_size = plane_ref.shape[2]
    b, i = jax.lax.div(number, jnp.int32(count)), jax.lax.rem(number, jnp.int32(count))
    slot = tile * indexer.KEYS + jnp.arange(indexer.KEYS, dtype=jnp.int32)
    there = slot < rows
    slot = jnp.minimum(slot, rows - 1)
    picked = plgpu.load(blocks_ref.at[b, i, jax.lax.div(slot, jnp.int32(size))])
    index = picked * size + jax.lax.rem(slot, jnp.int32(size))
    seen = there & (picked >= 0) & (index < limit_ref[b, i])
    index = jnp.where(seen, index, 0)
    page = plgpu.load(pages_ref.at[b, jax.lax.div(index, jnp.int32(page_size))])
    inside = jax.lax.rem(index, jnp.int32(page_size))
    head = jnp.arange(tools.power(heads, 16), dtype=jnp.int32)
    real = head < heads
    head = jnp.minimum(head, heads - 1)
    q, keys = [], []
    for part in tools.parts(dim):
        place, channel = tools.cells(inside, part)
        mask = jnp.broadcast_to(seen[:, None], (indexer.KEYS, part[1]))
        ref = plane_ref.at[layer_ref[0], page[:, None], place, channel]
        keys.append(plgpu.load(ref, mask=mask, other=0.0))
        q.append(plgpu.load(q_ref.at[b, i, head[:, None], channel]))
    weights = jnp.where(real, plgpu.load(weights_ref.at[b, i, head]), 0.0)
    found = jnp.sum(indexer.head_scores(q, keys, weights, scale, precision), axis=0)
    out = jnp.where(there, slot, rows)
    plgpu.store(out_ref.at[b, i, out], jnp.where(seen, found, -jnp.inf), mask=there)
