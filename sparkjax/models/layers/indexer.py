"""The indexer of sparse attention: which cached rows each query will attend to.

Its keys are cached beside the attention's. While a page table holds no more rows than are chosen,
there is nothing to choose, and the selection is None ("all").
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ...kernels import attention as attention_kernel
from ...kernels import indexer as kernel
from ...kernels.linear import linear
from ...mesh.context import Context
from .. import cache as caches
from ..batch import Batch
from ..config import ConfigReader
from ..params import Dim, Param
from .pools import completed, declare_open, pool_tokens, weighted
from .rope import rotate_half, rotate_interleaved

FULL, SHARED = "full", "shared"
"""Layers that run an indexer, and layers that reuse what an earlier one chose."""
KEY_EPS = 1e-6
"""Of the key norm, whatever the config's norms use."""


@dataclasses.dataclass(frozen=True)
class Index:
    """Shapes of an indexer.

    Attributes:
      heads, dim: of its queries; there is one key head.
      top: how many tokens are chosen.
      interleaved: how rope pairs channels (always on the first ones).
      pool: how many tokens share a key.
    """

    heads: int
    dim: int
    top: int
    interleaved: bool = True
    pool: int = 1


def read_indexer_types(r: ConfigReader, layers: int) -> tuple[str, ...]:
    """`indexer_types`, or the schedule that older configs spell out."""
    types = r.read("indexer_types", list, None)
    if types is None and r.has("index_topk_pattern"):
        names = {"F": FULL, "S": SHARED, FULL: FULL, SHARED: SHARED}
        try:
            pattern = r.read("index_topk_pattern", str)
        except ValueError:
            pattern = r.read("index_topk_pattern", list)
        types = [names.get(c, c) for c in pattern]
    if types is None:
        every = max(r.read("index_topk_freq", int, 1, least=1), 1)
        offset = r.read("index_skip_topk_offset", int, 2)
        types = [SHARED if max(i - offset + 1, 0) % every else FULL for i in range(layers)]
    if len(types) != layers or not set(types) <= {FULL, SHARED}:
        raise r.refuse("indexer_types", types, f"{layers} entries of {FULL} or {SHARED}")
    return tuple(types)


def declare_indexer(
    index: Index, hidden: int, q_rank: int, layers: tuple[int, ...], prefix: str
) -> dict[str, Param]:
    """Parameters under `prefix` (with `{layer}`); every rank holds all of them."""
    embed, key = Dim(hidden, "embed"), Dim(index.dim)
    return {
        "q_b": Param(f"{prefix}.wq_b.weight", (Dim(index.heads * index.dim), Dim(q_rank)), layers),
        "k": Param(f"{prefix}.wk.weight", (key, embed), layers),
        "k_norm": Param(f"{prefix}.k_norm.weight", (key,), layers, init="ones"),
        "k_norm_bias": Param(f"{prefix}.k_norm.bias", (key,), layers, init="zeros"),
        "weights": Param(f"{prefix}.weights_proj.weight", (Dim(index.heads), embed), layers),
    }


def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last axis, float32 (Ba et al. 2016)."""
    x = x.astype(jnp.float32)
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred * jax.lax.rsqrt(jnp.mean(centred * centred, -1, keepdims=True) + eps)
    return scaled * weight.astype(jnp.float32) + bias.astype(jnp.float32)


def index_key(
    x: jax.Array, p: dict[str, Any], at: Any, batch: Batch, context: Context
) -> jax.Array:
    """float32 [B, Q, dim], normalised, without positions."""
    k = linear(x, p["k"], at, context=context, rows=batch.rows)
    return layer_norm(k, p["k_norm"][at], p["k_norm_bias"][at], KEY_EPS)


def index_query(
    x: jax.Array,
    latent: jax.Array,
    p: dict[str, Any],
    at: Any,
    index: Index,
    batch: Batch,
    context: Context,
) -> tuple[jax.Array, jax.Array]:
    """(queries [B, Q, heads, dim] without positions, float32 head weights [B, Q, heads])."""
    q = linear(latent, p["q_b"], at, context=context, rows=batch.rows)
    q = q.reshape(*q.shape[:-1], index.heads, index.dim)
    w = linear(x.astype(jnp.float32), p["weights"], at, context=context, rows=batch.rows)
    return q, w * index.heads**-0.5


def select_tokens(
    x: jax.Array,
    latent: jax.Array,
    p: dict[str, Any],
    at: Any,
    cache: caches.Caches,
    name: str,
    slot: Any,
    batch: Batch,
    index: Index,
    context: Context,
    rope: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array | None, caches.Caches]:
    """The `top` best tokens up to each query's own: int32 [B, Q, top] positions, rising, -1 where
    there are fewer (None: all). Caches the new tokens' keys, rotated, in `name` at `slot`.

    score_j = sum_h (weights x)_h heads^-1/2 relu(q_h . k_j dim^-1/2)
    """
    rotate = rotate_interleaved if index.interleaved else rotate_half
    k = rotate(index_key(x, p, at, batch, context)[..., None, :], *rope)[..., 0, :]
    where = (slot, batch.pages, batch.start, batch.lengths)
    plane = attention_kernel.paged_write(cache[name], k, *where, context=context)
    cache = {**cache, name: plane}
    if batch.pages.shape[1] * plane.shape[2] <= index.top:
        return None, cache
    q, weights = index_query(x, latent, p, at, index, batch, context)
    limit = jnp.where(batch.valid, batch.positions + 1, 0)
    chosen = kernel.select(
        rotate(q, *rope), weights, plane, slot, batch.pages, limit,
        context=context, k=index.top, scale=index.dim**-0.5,
    )  # fmt: skip
    return chosen, cache


# --- Pooled keys --------------------------------------------------------------------------------


def declare_pooled_indexer(
    index: Index, hidden: int, q_rank: int, layers: tuple[int, ...], prefix: str
) -> dict[str, Param]:
    """`declare_indexer`, and what averages the keys of a pool."""
    pool = f"{prefix}.index_kpool_compress"
    key = Dim(index.dim)
    return {
        **declare_indexer(index, hidden, q_rank, layers, prefix),
        "pool_gate": Param(f"{pool}_gate", (key, Dim(hidden, "embed")), layers),
        "pool_bias": Param(f"{pool}_ape", (Dim(index.pool), key), layers, init="zeros"),
    }


def declare_pooled_keys(
    index: Index, layers: tuple[int, ...], prefix: str = ""
) -> dict[str, caches.Declaration]:
    """The planes "index" (a row a pool) and "index_open" (tokens of the pool that is not full)."""
    keys = caches.Paged(layers, (Dim(index.dim),), stride=index.pool)
    planes: dict[str, caches.Declaration] = {f"{prefix}index": keys}
    if index.pool > 1:
        planes[f"{prefix}index_open"] = declare_open(2 * index.dim, index.pool, layers)
    return planes


def select_pools(
    x: jax.Array,
    latent: jax.Array,
    p: dict[str, Any],
    at: Any,
    cache: caches.Caches,
    slot: Any,
    batch: Batch,
    index: Index,
    context: Context,
    prefix: str = "",
) -> tuple[jax.Array | None, caches.Caches]:
    """As `select_tokens`, without positions and by pools of `index.pool` tokens: the top / pool
    best pools that are complete up to the query, and the query's own pool while it is not.

    Returns:
      int32 [B, Q, top + pool - 1] token positions, -1 where there are fewer (None: all).
    """
    size, name, ring = index.pool, f"{prefix}index", f"{prefix}index_open"
    k = index_key(x, p, at, batch, context)
    gate = linear(x, p["pool_gate"], at, context=context, rows=batch.rows).astype(jnp.float32)
    both = jnp.concatenate([k, gate], -1)
    if size > 1:
        tokens, kept = pool_tokens(both, cache[ring], slot, batch, size)
        cache = {**cache, ring: kept}
    else:
        tokens = both[:, :, None]
    values, gates = jnp.split(tokens, 2, axis=-1)
    keys = weighted(values, gates + p["pool_bias"][at].astype(jnp.float32))
    first, count = completed(batch, size)
    plane = attention_kernel.paged_write(
        cache[name], keys, slot, batch.pages, first, count, context=context
    )
    cache = {**cache, name: plane}
    if batch.pages.shape[1] * plane.shape[2] * size <= index.top + size - 1:
        return None, cache
    q, weights = index_query(x, latent, p, at, index, batch, context)
    limit = jnp.where(batch.valid, (batch.positions + 1) // size, 0)
    chosen = kernel.select(
        q, weights, plane, slot, batch.pages, limit,
        context=context, k=index.top // size, scale=index.dim**-0.5,
    )  # fmt: skip
    inside = jnp.arange(size, dtype=jnp.int32)
    picked = jnp.where(chosen[..., None] < 0, -1, chosen[..., None] * size + inside)
    own = limit[..., None] * size + inside[:-1]
    own = jnp.where(batch.valid[..., None] & (own <= batch.positions[..., None]), own, -1)
    return jnp.concatenate([picked.reshape(*picked.shape[:2], -1), own], -1), cache
