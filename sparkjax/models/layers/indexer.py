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
from ..params import Dim, Param
from .rope import rotate_half, rotate_interleaved

KEY_EPS = 1e-6
"""Of the key norm, whatever the config's norms use."""


@dataclasses.dataclass(frozen=True)
class Index:
    """Shapes of an indexer.

    Attributes:
      heads, dim: of its queries; there is one key head.
      top: how many tokens are chosen.
      interleaved: how rope pairs channels (always on the first ones).
    """

    heads: int
    dim: int
    top: int
    interleaved: bool = True


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
