"""`upto` on a GPU: one pass over keys and weights for all edges, then one over what each piece found.

XLA makes a kernel of every slice of the reference's tree of additions: two thousand for the filters
of one step.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .. import pallas as tools
from ..pallas import plgpu

PIECE = 1024
"""Keys that one program looks at; the order of the additions hangs on it and on nothing else."""


def supports(keys: Any, edges: Any) -> str | None:
    """None if `upto` can take these, else the reason."""
    count = edges.shape[-1]
    return None if count & (count - 1) == 0 else f"{count} edges; a power of two is supported"


def upto(
    keys: jax.Array, weights: jax.Array | None, edges: jax.Array, *, interpret: bool = False
) -> jax.Array:
    """[B, E]; arguments as in `reference.upto`."""
    batch, vocab = keys.shape
    count, pieces = edges.shape[1], -(-vocab // PIECE)
    dtype = jnp.int32 if weights is None else weights.dtype
    parts = tools.call(
        _parts if weights is not None else functools.partial(_parts, None),
        (pieces, batch),
        jax.ShapeDtypeStruct((batch, pieces, count), dtype),
        interpret=interpret,
        name="row_sums_parts",
    )(*([] if weights is None else [weights]), keys, edges)
    return tools.call(
        _join,
        (batch,),
        jax.ShapeDtypeStruct((batch, count), dtype),
        interpret=interpret,
        name="row_sums_join",
    )(parts)


def _parts(weights_ref: Any, keys_ref: Any, edges_ref: Any, out_ref: Any) -> None:
    piece, row = pl.program_id(0), pl.program_id(1)
    vocab = keys_ref.shape[1]
    at = piece * PIECE + jnp.arange(PIECE, dtype=jnp.int32)
    inside = at < vocab
    place = jnp.minimum(at, vocab - 1)
    keys = plgpu.load(keys_ref.at[row, place], mask=inside, other=0)
    if weights_ref is None:
        weights = inside.astype(jnp.int32)
    else:
        weights = plgpu.load(weights_ref.at[row, place], mask=inside, other=0)
    for e in range(edges_ref.shape[1]):
        found = jnp.where(keys <= edges_ref[row, e], weights, jnp.zeros_like(weights))
        out_ref[row, piece, e] = jnp.sum(found)


def _join(parts_ref: Any, out_ref: Any) -> None:
    row = pl.program_id(0)
    _, pieces, count = parts_ref.shape
    piece = jnp.arange(tools.power(pieces), dtype=jnp.int32)
    edge = jnp.arange(count, dtype=jnp.int32)
    parts = plgpu.load(
        parts_ref.at[row, jnp.minimum(piece, pieces - 1)[:, None], edge[None, :]],
        mask=(piece < pieces)[:, None] & (edge >= 0)[None, :],
        other=0,
    )
    plgpu.store(out_ref.at[row, edge], jnp.sum(parts, axis=0))
