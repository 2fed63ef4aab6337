"""Kimi delta attention as a layer (Kimi team 2025, as in GLM-5.3-Flash).

    q | k | v = silu(conv(W_q x | W_k x | W_v x))
    g = low sigmoid(exp(A_log) (f_b f_a x + dt_bias))     # per head and key channel; low < 0
        (without a bound: -exp(A_log) softplus(f_b f_a x + dt_bias))
    beta = sigmoid(W_b x)                                 # per head
    o = kda(q, k, v, g, beta)
    y = W_o (w * rms(o) * sigmoid(g_b g_a x))             # w per head channel, float32 throughout

A sequence carries its state [heads, dim, dim] and the convolution's last inputs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ...kernels.kda import kda as kernel
from ...kernels.linear import linear, linear_group
from ...mesh.context import Context
from ...mesh.units import even
from .. import cache as caches
from ..batch import Batch
from ..params import Dim, Param, spread
from .norm import rms_norm
from .short_conv import declare_conv, declare_tail, short_conv


@dataclasses.dataclass(frozen=True)
class Kimi:
    """Shapes of the KDA layers of a model.

    Attributes:
      dim: channels of a head, keys and values alike.
      width: taps of the convolution.
      low: lower bound of the log decay, or None for an unbounded one.
    """

    heads: int
    dim: int
    width: int
    low: float | None
    eps: float


def declare_kda(
    shape: Kimi, hidden: int, layers: tuple[int, ...], prefix: str, ranks: int
) -> dict[str, Param]:
    """Parameters under `prefix` (with `{layer}`); heads are spread over ranks."""
    embed, dim = Dim(hidden, "embed"), Dim(shape.dim)
    wide = spread(even(shape.heads, ranks, shape.dim), "heads")
    heads = spread(even(shape.heads, ranks), "heads")

    def matrix(name: str, out: Dim, into: Dim) -> Param:
        return Param(f"{prefix}.{name}.weight", (out, into), layers)

    params = {
        "f_a": matrix("f_a_proj", dim, embed),
        "f_b": matrix("f_b_proj", wide, dim),
        "g_a": matrix("g_a_proj", dim, embed),
        "g_b": matrix("g_b_proj", wide, dim),
        "b": matrix("b_proj", heads, embed),
        "A_log": Param(f"{prefix}.A_log", (heads,), layers, dtype="float32", init="zeros"),
        "dt_bias": Param(f"{prefix}.dt_bias", (wide,), layers, dtype="float32", init="ones"),
        "norm": Param(f"{prefix}.o_norm.weight", (dim,), layers, init="ones"),
        "o": matrix("o_proj", embed, wide),
    }
    for name in "qkv":
        params[name] = matrix(f"{name}_proj", wide, embed)
        conv = f"{prefix}.{name}_conv1d.weight"
        params[f"{name}_conv"] = declare_conv(wide, shape.width, layers, conv, dtype="float32")
    return params


def declare_kda_caches(
    shape: Kimi, layers: tuple[int, ...], ranks: int
) -> dict[str, caches.Declaration]:
    """The planes "kda_state" and "kda_conv" (a rank's q | k | v) of these layers."""
    heads = len(even(shape.heads, ranks).source)
    state = (Dim(heads, "heads"), Dim(shape.dim), Dim(shape.dim))
    return {
        "kda_state": caches.State(layers, state),
        "kda_conv": declare_tail(Dim(3 * heads * shape.dim, "heads"), shape.width, layers),
    }


def kda(
    x: jax.Array,
    p: dict[str, Any],
    at: Any,
    cache: caches.Caches,
    slot: Any,
    batch: Batch,
    shape: Kimi,
    context: Context,
) -> tuple[jax.Array, caches.Caches]:
    """One layer over normalised x [B, Q, H]; returns its output and the caches.

    Args:
      p, at: stacked parameters of `declare_kda`, and this layer's place in them.
      slot: this layer's place in the planes of `declare_kda_caches`.
    """

    def through(name: str, value: jax.Array) -> jax.Array:
        return linear(value, p[name], at, context=context, rows=batch.rows)

    def heads(y: jax.Array) -> jax.Array:
        return y.reshape(*y.shape[:2], -1, shape.dim)

    names = ("q", "k", "v", "f_a", "g_a", "b")
    *qkv, decay, gate, beta = linear_group(
        x, [p[name] for name in names], at, context=context, rows=batch.rows
    )
    mixed = jnp.concatenate(qkv, -1)
    taps = jnp.concatenate([p[f"{name}_conv"][at] for name in "qkv"], 0)
    mixed, cache = short_conv(mixed, taps, None, cache, "kda_conv", slot, batch, context)
    q, k, v = (heads(y) for y in jnp.split(mixed, 3, axis=-1))
    raw = through("f_b", decay).astype(jnp.float32) + p["dt_bias"][at]
    rate = jnp.exp(p["A_log"][at])[:, None]
    if shape.low is None:
        g = -rate * jax.nn.softplus(heads(raw))
    else:
        g = shape.low * jax.nn.sigmoid(rate * heads(raw))
    beta = jax.nn.sigmoid(beta.astype(jnp.float32))
    out, plane = kernel(
        q, k, v, g, beta, cache["kda_state"], slot, batch.slots, batch.start, batch.lengths,
        context=context,
    )  # fmt: skip
    gate = jax.nn.sigmoid(heads(through("g_b", gate)).astype(jnp.float32))
    out = rms_norm(out.astype(jnp.float32), p["norm"], at, eps=shape.eps) * gate
    y = through("o", out.astype(x.dtype).reshape(*x.shape[:2], -1))
    return context.all_reduce(y), {**cache, "kda_state": plane}
