"""Gated DeltaNet as a layer (Yang et al. 2024, as in Qwen3-Next and its successors).

    q | k | v = silu(conv(W_qkv x)),  z = W_z x
    beta = sigmoid(W_b x),  g = -exp(A_log) softplus(W_a x + dt_bias)     # one per value head
    o = gated_delta(q, k, v, g, beta)
    y = W_out (w * rms(o) * act(z))                                       # w plain, per head channel

A sequence carries its state [heads, key dim, value dim] and the convolution's last inputs.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from ...kernels.gated_delta import gated_delta
from ...kernels.linear import linear, linear_group
from ...mesh.context import Context
from ...mesh.units import PAD, HeadLayout, Units, grouped_heads
from .. import cache as caches
from ..batch import Batch
from ..params import Dim, Param, spread
from .norm import rms_norm
from .short_conv import declare_conv, declare_tail, short_conv

GATES = {"silu": jax.nn.silu, "sigmoid": jax.nn.sigmoid}


@dataclasses.dataclass(frozen=True)
class Delta:
    """Shapes of the GDN layers of a model.

    Attributes:
      key_heads, value_heads: value head j reads key head j // (value_heads / key_heads).
      key_dim, value_dim: channels of a head.
      width: taps of the convolution.
      gate: activation of the output gate, "silu" or "sigmoid".
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int
    eps: float
    gate: str = "silu"

    def layout(self, ranks: int) -> HeadLayout:
        """Value heads in the place of query heads: each follows its key head to a rank."""
        return grouped_heads(self.value_heads, self.key_heads, ranks)

    def channels(self, ranks: int) -> Dim:
        """The channels q | k | v of the convolution; over several ranks, each rank's q | k | v
        behind one another."""
        layout = self.layout(ranks)
        size = math.gcd(self.key_dim, self.value_dim)
        per_key, per_value = self.key_dim // size, self.value_dim // size
        keys, values = self.key_heads * per_key, self.value_heads * per_value

        def pieces(heads: tuple[int, ...], each: int, base: int) -> list[int]:
            return [
                PAD if head == PAD else base + head * each + i
                for head in heads
                for i in range(each)
            ]

        source: list[int] = []
        share_k, share_v = len(layout.key) // ranks, len(layout.query) // ranks
        for rank in range(ranks):
            key = layout.key[rank * share_k : (rank + 1) * share_k]
            value = layout.query[rank * share_v : (rank + 1) * share_v]
            source += pieces(key, per_key, 0) + pieces(key, per_key, keys)
            source += pieces(value, per_value, 2 * keys)
        return spread(Units(size, tuple(source), 2 * keys + values), "heads")


def declare_gdn(
    delta: Delta, hidden: int, layers: tuple[int, ...], prefix: str, ranks: int
) -> dict[str, Param]:
    """Parameters of GDN under `prefix` (with `{layer}`)."""
    layout, embed, channels = delta.layout(ranks), Dim(hidden, "embed"), delta.channels(ranks)
    heads = spread(layout.queries(1), "heads")
    values = spread(layout.queries(delta.value_dim), "heads")

    def matrix(name: str, out: Dim, into: Dim) -> Param:
        return Param(f"{prefix}.{name}.weight", (out, into), layers)

    return {
        "qkv": matrix("in_proj_qkv", channels, embed),
        "z": matrix("in_proj_z", values, embed),
        "b": matrix("in_proj_b", heads, embed),
        "a": matrix("in_proj_a", heads, embed),
        "conv": declare_conv(channels, delta.width, layers, f"{prefix}.conv1d.weight"),
        "A_log": Param(f"{prefix}.A_log", (heads,), layers, dtype="float32", init="zeros"),
        "dt_bias": Param(f"{prefix}.dt_bias", (heads,), layers, dtype="float32", init="ones"),
        "norm": Param(f"{prefix}.norm.weight", (Dim(delta.value_dim),), layers, init="ones"),
        "out": matrix("out_proj", embed, values),
    }


def declare_gdn_caches(
    delta: Delta, layers: tuple[int, ...], ranks: int
) -> dict[str, caches.Declaration]:
    """The planes "gdn_state" and "gdn_conv" of these layers."""
    heads = Dim(len(delta.layout(ranks).query), "heads")
    return {
        "gdn_state": caches.State(layers, (heads, Dim(delta.key_dim), Dim(delta.value_dim))),
        "gdn_conv": declare_tail(delta.channels(ranks), delta.width, layers),
    }


def gdn(
    x: jax.Array,
    p: dict[str, Any],
    at: Any,
    cache: caches.Caches,
    slot: Any,
    batch: Batch,
    delta: Delta,
    context: Context,
) -> tuple[jax.Array, caches.Caches]:
    """One layer over normalised x [B, Q, H]; returns its output and the caches.

    Args:
      p, at: stacked parameters of `declare_gdn`, and this layer's place in them.
      slot: this layer's place in the planes of `declare_gdn_caches`.
    """
    weights = (p["qkv"], p["z"], p["b"], p["a"])
    mixed, z, b, a = linear_group(x, weights, at, context=context, rows=batch.rows)
    beta = jax.nn.sigmoid(b.astype(jnp.float32))
    step = jax.nn.softplus(a.astype(jnp.float32) + p["dt_bias"][at])
    g = -jnp.exp(p["A_log"][at]) * step
    mixed, cache = short_conv(mixed, p["conv"], at, cache, "gdn_conv", slot, batch, context)
    value_heads = g.shape[-1]
    keys = (mixed.shape[-1] - value_heads * delta.value_dim) // 2
    q, k, v = jnp.split(mixed, (keys, 2 * keys), axis=-1)

    def heads(y: jax.Array, dim: int) -> jax.Array:
        return y.reshape(*y.shape[:2], -1, dim)

    out, plane = gated_delta(
        heads(q, delta.key_dim),
        heads(k, delta.key_dim),
        heads(v, delta.value_dim),
        g,
        beta,
        cache["gdn_state"],
        slot,
        batch.slots,
        batch.start,
        batch.lengths,
        context=context,
    )
    out = rms_norm(out, p["norm"], at, eps=delta.eps)
    gate = GATES[delta.gate](heads(z, delta.value_dim).astype(jnp.float32))
    out = (out.astype(jnp.float32) * gate).astype(x.dtype)
    out = out.reshape(*out.shape[:2], -1)
    y = context.all_reduce(linear(out, p["out"], at, context=context, rows=batch.rows))
    return y, {**cache, "gdn_state": plane}
