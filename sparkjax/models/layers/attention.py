"""Grouped-query attention as a layer: projections, head norms, rope, cache, output."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from ...kernels import attention as attention_kernel
from ...kernels.linear import linear, linear_group
from ...mesh.context import Context
from ...mesh.units import HeadLayout
from .. import cache as caches
from ..batch import Batch
from ..params import Dim, Param, spread
from .norm import rms_norm
from .rope import rotate_half
from .stack import Layer


@dataclasses.dataclass(frozen=True)
class Heads:
    """Shapes of one kind of attention layer.

    Attributes:
      layout: query and key heads over ranks.
      dim: channels of a query or key head; `value_dim` of a value head.
      scale: what query-key products are multiplied by.
      window: keys that a query sees, itself included; 0 sees all.
      eps, zero_centred, late_cast: of the per-head query and key norms, where there are any.
      value_scale: what values are multiplied by before they are cached.
    """

    layout: HeadLayout
    dim: int
    value_dim: int
    scale: float
    window: int = 0
    softcap: float = 0.0
    eps: float = 1e-6
    zero_centred: bool = False
    late_cast: bool = False
    value_scale: float = 1.0


def declare_attention(
    heads: Heads,
    hidden: int,
    layers: tuple[int, ...],
    prefix: str,
    *,
    bias: bool = False,
    output_bias: bool = False,
    head_norms: bool = False,
) -> dict[str, Param]:
    """Parameters of grouped-query attention under `prefix` (with `{layer}`)."""
    embed = Dim(hidden, "embed")
    q = spread(heads.layout.queries(heads.dim), "heads")
    k = spread(heads.layout.keys(heads.dim), "kv_heads")
    v = spread(heads.layout.keys(heads.value_dim), "kv_heads")
    o = spread(heads.layout.queries(heads.value_dim), "heads")

    def matrix(name: str, out: Dim, into: Dim) -> Param:
        return Param(f"{prefix}.{name}.weight", (out, into), layers)

    params = {
        "q": matrix("q_proj", q, embed),
        "k": matrix("k_proj", k, embed),
        "v": matrix("v_proj", v, embed),
        "o": matrix("o_proj", embed, o),
    }
    if bias:
        for name, dim in (("q", q), ("k", k), ("v", v)):
            params[f"{name}_bias"] = Param(
                f"{prefix}.{name}_proj.bias", (dim,), layers, init="zeros"
            )
    if output_bias:
        params["o_bias"] = Param(f"{prefix}.o_proj.bias", (embed,), layers, init="zeros")
    if head_norms:
        init = "zeros" if heads.zero_centred else "ones"
        for name in ("q_norm", "k_norm"):
            dims = (Dim(heads.dim),)
            params[name] = Param(f"{prefix}.{name}.weight", dims, layers, init=init)
    return params


def declare_sinks(heads: Heads, layers: tuple[int, ...], *names: str) -> Param:
    """One more softmax logit a query head, float32; `names` (with `{layer}`) are its spellings."""
    dims = (spread(heads.layout.queries(1), "heads"),)
    return Param(names[0], dims, layers, dtype="float32", init="zeros", also=names[1:])


def declare_kv(
    heads: Heads, layers: tuple[int, ...], reads: int | None = None
) -> dict[str, caches.Declaration]:
    """The cache planes "k" and "v" of these layers: paged, or rings for a sliding window. `reads` as
    in `caches.Paged`."""
    keys = Dim(len(heads.layout.key), "kv_heads")
    planes: dict[str, caches.Declaration] = {}
    for name, dim in (("k", heads.dim), ("v", heads.value_dim)):
        dims = (keys, Dim(dim))
        if heads.window:
            planes[name] = caches.Ring(layers, dims, heads.window - 1)
        else:
            planes[name] = caches.Paged(layers, dims, reads=reads)
    return planes


def project(
    x: jax.Array,
    p: dict[str, Any],
    at: Any,
    heads: Heads,
    batch: Batch,
    context: Context,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x [B, Q, H] as queries, keys and values [B, Q, heads, dim]."""
    weights = (p["q"], p["k"], p["v"])
    outs = linear_group(x, weights, at, context=context, rows=batch.rows)
    found = []
    for name, y, dim in zip("qkv", outs, (heads.dim, heads.dim, heads.value_dim), strict=True):
        if f"{name}_bias" in p:
            y = y + p[f"{name}_bias"][at].astype(y.dtype)
        found.append(y.reshape(*y.shape[:-1], -1, dim))
    q, k, v = found
    if heads.value_scale != 1.0:
        v = v * jnp.asarray(heads.value_scale, v.dtype)
    return q, k, v


def attention(
    x: jax.Array,
    p: dict[str, Any],
    cache: caches.Caches,
    names: tuple[str, str],
    batch: Batch,
    layer: Layer,
    heads: Heads,
    layers: tuple[int, ...],
    context: Context,
    rope: tuple[jax.Array, jax.Array] | None,
    cached: tuple[int, ...],
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, caches.Caches]:
    """One attention layer over normalised x [B, Q, H]; returns its output and the caches.

    Args:
      p: stacked parameters of `declare_attention`, stacked over `layers`.
      names: the caches that hold keys and values, stacked over `cached`.
      rope: (cos, sin) [B, Q, dim / 2] in float32, or None for no positions.
    """
    at, slot = layer.within(layers), layer.within(cached)
    q, k, v = project(x, p, at, heads, batch, context)
    if "q_norm" in p:
        norm = functools.partial(
            rms_norm, eps=heads.eps, zero_centred=heads.zero_centred, late_cast=heads.late_cast
        )
        q, k = norm(q, p["q_norm"], at), norm(k, p["k_norm"], at)
    if rope is not None:
        q, k = rotate_half(q, *rope), rotate_half(k, *rope)
    out, cache = attend_cached(q, k, v, cache, names, batch, slot, heads, context, sinks)
    return output(out, p, at, batch, context), cache


def attend_cached(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cache: caches.Caches,
    names: tuple[str, str],
    batch: Batch,
    slot: Any,
    heads: Heads,
    context: Context,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, caches.Caches]:
    """Writes the new keys and values at `slot` of the stacked caches and attends."""
    planes = cache[names[0]], cache[names[1]]
    if heads.window:
        out = attention_kernel.ring_attention(
            q,
            k,
            v,
            *planes,
            slot,
            batch.slots,
            batch.start,
            batch.lengths,
            context=context,
            window=heads.window,
            scale=heads.scale,
            softcap=heads.softcap,
            sinks=sinks,
        )
        planes = (
            caches.write_ring(planes[0], slot, k, batch),
            caches.write_ring(planes[1], slot, v, batch),
        )
    else:
        where = (slot, batch.pages, batch.start, batch.lengths)
        planes = (
            attention_kernel.paged_write(planes[0], k, *where, context=context),
            attention_kernel.paged_write(planes[1], v, *where, context=context),
        )
        out = attention_kernel.paged_attention(
            q,
            *planes,
            *where,
            context=context,
            scale=heads.scale,
            softcap=heads.softcap,
            sinks=sinks,
        )
    return out, {**cache, names[0]: planes[0], names[1]: planes[1]}


def output(
    heads_out: jax.Array, p: dict[str, Any], at: Any, batch: Batch, context: Context
) -> jax.Array:
    """Heads [B, Q, heads, dim] through the output projection, summed over ranks: [B, Q, H]."""
    flat = heads_out.reshape(*heads_out.shape[:2], -1)
    y = context.all_reduce(linear(flat, p["o"], at, context=context, rows=batch.rows))
    if "o_bias" in p:
        y = y + p["o_bias"][at].astype(y.dtype)
    return y


def softcap(logits: jax.Array, cap: float | None) -> jax.Array:
    """c tanh(logits / c), or the logits themselves without a cap."""
    return logits if not cap else cap * jnp.tanh(logits / cap)
