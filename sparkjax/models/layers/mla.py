"""Multi-head latent attention (DeepSeek-V2): keys and values of all heads from one latent a token.

The cache holds, per token, the normalised latent and the rotated key part that all heads share.
Queries are taken into the latent space and outputs out of it (kv_b absorbed on both sides):

    q_h . k_j = (W_uk,h^T q_nope,h) . c_j + q_rope,h . k_rope,j
    o_h       = W_uv,h sum_j p_j c_j

so a cached row [c | k_rope] is the key of every head and, without its tail, the value.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ...kernels import attention as attention_kernel
from ...kernels import sparse_attention as sparse_kernel
from ...kernels.linear import linear, linear_group
from ...mesh.context import Context
from ...mesh.units import even
from ...weights import formats
from .. import cache as caches
from ..batch import Batch
from ..params import Dim, Param, spread
from .norm import rms_norm
from .rope import rotate_interleaved


@dataclasses.dataclass(frozen=True)
class Latent:
    """Shapes of latent attention.

    Attributes:
      q_rank, kv_rank: widths of the latents.
      nope, rope: channels of a query-key head without and with positions (in this order).
      value: channels of a value head.
      scale: what query-key products are multiplied by.
      eps: of the two latent norms.
      bias: whether q_a, kv_a and o have biases.
    """

    heads: int
    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int
    scale: float
    eps: float
    bias: bool = False

    @property
    def row(self) -> int:
        """Channels of a cached row."""
        return self.kv_rank + self.rope


def declare_mla(
    shape: Latent, hidden: int, layers: tuple[int, ...], prefix: str, ranks: int
) -> dict[str, Param]:
    """Parameters under `prefix` (with `{layer}`); heads are spread over ranks, latents are not."""
    embed = Dim(hidden, "embed")

    def heads(size: int) -> Dim:
        return spread(even(shape.heads, ranks, size), "heads")

    def matrix(name: str, out: Dim, into: Dim) -> Param:
        return Param(f"{prefix}.{name}.weight", (out, into), layers)

    def norm(name: str, size: int) -> Param:
        return Param(f"{prefix}.{name}.weight", (Dim(size),), layers, init="ones")

    params = {
        "q_a": matrix("q_a_proj", Dim(shape.q_rank), embed),
        "q_a_norm": norm("q_a_layernorm", shape.q_rank),
        "q_b": matrix("q_b_proj", heads(shape.nope + shape.rope), Dim(shape.q_rank)),
        "kv_a": matrix("kv_a_proj_with_mqa", Dim(shape.row), embed),
        "kv_a_norm": norm("kv_a_layernorm", shape.kv_rank),
        "kv_b": matrix("kv_b_proj", heads(shape.nope + shape.value), Dim(shape.kv_rank)),
        "o": matrix("o_proj", embed, heads(shape.value)),
    }
    if shape.bias:
        biases = (("q_a", "q_a_proj", Dim(shape.q_rank)), ("kv_a", "kv_a_proj_with_mqa", Dim(shape.row)))
        for key, name, dim in (*biases, ("o", "o_proj", embed)):
            params[f"{key}_bias"] = Param(f"{prefix}.{name}.bias", (dim,), layers, init="zeros")
    return params


def declare_latents(
    shape: Latent, layers: tuple[int, ...], reads: int | None = None
) -> caches.Paged:
    """The cached rows [c | k_rope] of these layers; every rank holds all of them. `reads` as in
    `caches.Paged`."""
    return caches.Paged(layers, (Dim(shape.row),), reads=reads)


def latents(
    x: jax.Array, p: dict[str, Any], at: Any, shape: Latent, batch: Batch, context: Context
) -> tuple[jax.Array, jax.Array]:
    """What normalised x [B, Q, H] is projected to: [B, Q, q_rank], which the query heads and the
    indexer's queries are made from, and the row to cache before its norm and positions."""
    names = ("q_a", "kv_a")
    found = linear_group(x, [p[name] for name in names], at, context=context, rows=batch.rows)
    y, row = (
        y + p[f"{name}_bias"][at].astype(y.dtype) if f"{name}_bias" in p else y
        for name, y in zip(names, found, strict=True)
    )
    return rms_norm(y, p["q_a_norm"], at, eps=shape.eps), row


def mla(
    row: jax.Array,
    latent: jax.Array,
    p: dict[str, Any],
    at: Any,
    cache: caches.Caches,
    name: str,
    slot: Any,
    batch: Batch,
    shape: Latent,
    context: Context,
    rope: tuple[jax.Array, jax.Array] | None,
    selected: jax.Array | None,
) -> tuple[jax.Array, caches.Caches]:
    """One latent attention layer; its output [B, Q, H] and the caches.

    Args:
      latent, row: `latents` of its input.
      at: this layer's place in `p`; `slot` in the cache `name`.
      rope: (cos, sin) float32 [B, Q, rope / 2]; None when `shape.rope` is 0.
      selected: int32 [B, Q, k], the token positions that each query attends to (-1: none);
        None attends to all.
    """
    b, q_len, _ = row.shape
    q = linear(latent, p["q_b"], at, context=context, rows=batch.rows)
    q = q.reshape(b, q_len, -1, shape.nope + shape.rope)
    c = rms_norm(row[..., : shape.kv_rank], p["kv_a_norm"], at, eps=shape.eps)
    # [heads, nope + value, kv_rank] of this rank.
    kv_b = formats.dequantize(p["kv_b"], at, row.dtype)
    kv_b = kv_b.reshape(-1, shape.nope + shape.value, shape.kv_rank)
    query = _into(q[..., : shape.nope], kv_b[:, : shape.nope])
    if rope is not None:
        turned = rotate_interleaved(row[..., None, shape.kv_rank :], *rope)[..., 0, :]
        c = jnp.concatenate([c, turned], -1)
        query = jnp.concatenate([query, rotate_interleaved(q[..., shape.nope :], *rope)], -1)
    where = (slot, batch.pages, batch.start, batch.lengths)
    plane = attention_kernel.paged_write(cache[name], c, *where, context=context)
    cache = {**cache, name: plane}
    if selected is None:
        rows = caches.gather_pages(plane, slot, batch)
        seen = jnp.arange(rows.shape[1]) <= batch.positions[..., None]
        keys: dict[str, Any] = {"rows": rows, "seen": seen & batch.valid[..., None]}
    else:
        keys = {"plane": plane, "layer": slot, "pages": batch.pages, "selected": selected}
    out = sparse_kernel.latent_attention(
        query, context=context, scale=shape.scale, value_dim=shape.kv_rank, **keys
    )
    out = _out_of(out, kv_b[:, shape.nope :]).reshape(b, q_len, -1)
    y = context.all_reduce(linear(out, p["o"], at, context=context, rows=batch.rows))
    return (y + p["o_bias"][at].astype(y.dtype) if "o_bias" in p else y), cache


def _per_head(equation: str, x: jax.Array, w: jax.Array) -> jax.Array:
    # Sums are float32 inside the product; a CPU has no such product with a float32 result.
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(equation, x, w, precision=precision)


def _into(q: jax.Array, w: jax.Array) -> jax.Array:
    """[B, Q, heads, nope] into the latent space."""
    return _per_head("bqhn,hnr->bqhr", q, w)


def _out_of(o: jax.Array, w: jax.Array) -> jax.Array:
    """[B, Q, heads, kv_rank] out of the latent space."""
    return _per_head("bqhr,hvr->bqhv", o, w)
