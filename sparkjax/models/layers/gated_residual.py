"""Gated residual: several residual streams that every sub-layer reads and adds to (Qwen4).

A site stands around every sub-layer. From the streams R_1 .. R_N of a token,

    Rn = (1 + w) * rms(R_i) per stream
    G  = sigmoid(up(silu(down(Rn) / N)))          # [N, H], through a low rank
    x  = mean_i G_i * Rn_i                        # what the sub-layer reads
    s  = 2 sigmoid(inject(Rn) / N)                # [N]
    R_i += s_i * sublayer(x)                      # R itself, not Rn; streams never mix

The model ends in one more mixer, without `inject`, in place of a final norm.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ...kernels.linear import linear
from ...mesh.context import Context
from ..params import Dim, Param
from .norm import rms


def declare_site(
    streams: int,
    hidden: int,
    rank: int,
    layers: tuple[int, ...] | None,
    prefix: str,
    inject: bool = True,
) -> dict[str, Param]:
    """Parameters under `prefix`; every rank holds all of them."""
    wide, low = Dim(streams * hidden), Dim(rank)
    params = {
        "norm": Param(f"{prefix}.hc_norm.weight", (wide,), layers, init="zeros"),
        "down": Param(f"{prefix}.input_mix_weight_down.weight", (low, wide), layers),
        "up": Param(f"{prefix}.input_mix_weight_up.weight", (wide, low), layers),
    }
    if inject:
        dims = (Dim(streams), wide)
        params["inject"] = Param(f"{prefix}.block_inject_weight.weight", dims, layers)
    return params


def stream_norm(x: jax.Array, weight: jax.Array, at: Any, eps: float) -> jax.Array:
    """(1 + w) * rms of every stream on its own. x: [..., N, H]; weight: [N * H], or stacked."""
    w = (weight if at is None else weight[at]).astype(jnp.float32).reshape(x.shape[-2:])
    return (rms(x, eps) * (1.0 + w)).astype(x.dtype)


def _mix(
    streams: jax.Array, p: dict[str, Any], at: Any, eps: float, context: Context, rows: Any
) -> tuple[jax.Array, jax.Array]:
    """(x [..., H], the normalised streams [..., N * H])."""
    count = streams.shape[-2]
    normed = stream_norm(streams, p["norm"], at, eps)
    flat = normed.reshape(*normed.shape[:-2], -1)
    low = jax.nn.silu(linear(flat, p["down"], at, context=context, rows=rows) / count)
    gate = jax.nn.sigmoid(linear(low, p["up"], at, context=context, rows=rows))
    mixed = gate.reshape(normed.shape).astype(jnp.float32) * normed.astype(jnp.float32)
    return jnp.mean(mixed, axis=-2).astype(streams.dtype), flat


def collapse(
    streams: jax.Array,
    p: dict[str, Any],
    at: Any,
    eps: float,
    context: Context,
    rows: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """What the sub-layer reads [..., H], and the weights [..., N] that its output is added with.

    Args:
      streams: [..., N, H].
      p, at: parameters of `declare_site`, and this layer's place in them.
    """
    x, flat = _mix(streams, p, at, eps, context, rows)
    inject = linear(flat, p["inject"], at, context=context, rows=rows)
    return x, 2 * jax.nn.sigmoid(inject / streams.shape[-2])


def last_mix(streams: jax.Array, p: dict[str, Any], eps: float, context: Context) -> jax.Array:
    """What the vocabulary projection reads, [..., H]; p: parameters of one site, without inject."""
    return _mix(streams, p, None, eps, context, None)[0]


def add(streams: jax.Array, y: jax.Array, weights: jax.Array) -> jax.Array:
    """R_i + s_i * y."""
    return streams + weights[..., None] * y[..., None, :]
