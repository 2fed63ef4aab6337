"""Manifold-constrained hyper-connections (mHC, Xie et al. 2026): several residual streams.

A site stands around every sub-layer. From the streams X_1 .. X_N of a token it computes, all in
float32,

    m    = fn rms(flatten X)                                  # over N * H values, no weight
    pre  = sigmoid(scale_0 m[:N] + base[:N]) + eps            # collapses: x = sum_i pre_i X_i
    post = 2 sigmoid(scale_1 m[N:2N] + base[N:2N])            # gives the output to each stream
    C    = softmax_rows(scale_2 m[2N:] + base[2N:]) + eps     # N x N, made doubly stochastic:
    C   /= colsum + eps;  (rounds - 1) times: C /= rowsum + eps, C /= colsum + eps
    X'_j = post_j y + sum_i C_ij X_i                          # y: the sub-layer's output

Two-pass families (glm5_next, deepseek_v4) collapse with the site's own `pre`; the single-pass one
(deepseek_v41) collapses with the previous site's, so the pieces are separate functions.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...weights import formats
from ..params import Dim, Param
from .norm import rms


@dataclasses.dataclass(frozen=True)
class Hyper:
    """N streams.

    Attributes:
      rounds: of the Sinkhorn normalisation.
      eps: its floor; `norm_eps` that of the norm over all streams.
    """

    streams: int
    rounds: int
    eps: float
    norm_eps: float


class Site(NamedTuple):
    """A site's coefficients for every token, float32: [..., N], [..., N], [..., N, N]."""

    pre: jax.Array
    post: jax.Array
    mix: jax.Array


def declare_site(
    hyper: Hyper, hidden: int, layers: tuple[int, ...], prefix: str, dtype: str = "float32"
) -> dict[str, Param]:
    """`{prefix}_fn`, `_base` and `_scale`; every rank holds all of them."""
    n = hyper.streams
    out = Dim((2 + n) * n)
    return {
        "fn": Param(f"{prefix}_fn", (out, Dim(n * hidden)), layers, dtype=dtype),
        "base": Param(f"{prefix}_base", (out,), layers, dtype="float32", init="zeros"),
        "scale": Param(f"{prefix}_scale", (Dim(3),), layers, dtype="float32", init="ones"),
    }


def declare_head(
    hyper: Hyper, hidden: int, prefix: str, layers: tuple[int, ...] | None = None
) -> dict[str, Param]:
    """`{prefix}_fn`, `_base` and `_scale` of a learned final collapse."""
    n = Dim(hyper.streams)
    fn = (n, Dim(hyper.streams * hidden))
    return {
        "fn": Param(f"{prefix}_fn", fn, layers, dtype="float32"),
        "base": Param(f"{prefix}_base", (n,), layers, dtype="float32", init="zeros"),
        "scale": Param(f"{prefix}_scale", (Dim(1),), layers, dtype="float32", init="ones"),
    }


def spread_streams(x: jax.Array, hyper: Hyper) -> jax.Array:
    """[..., H] copied into [..., N, H]."""
    return jnp.broadcast_to(x[..., None, :], (*x.shape[:-1], hyper.streams, x.shape[-1]))


def _logits(streams: jax.Array, p: dict[str, Any], at: Any, hyper: Hyper) -> jax.Array:
    """fn rms(flatten X), float32 [..., out]."""
    flat = rms(streams.reshape(*streams.shape[:-2], -1), hyper.norm_eps)
    fn = formats.dequantize(p["fn"], at, jnp.float32)
    return jnp.einsum("...k,nk->...n", flat, fn, precision=jax.lax.Precision.HIGHEST)


def site(streams: jax.Array, p: dict[str, Any], at: Any, hyper: Hyper) -> Site:
    """The coefficients of one site; streams are [..., N, H]."""
    n, eps = hyper.streams, hyper.eps
    m = _logits(streams, p, at, hyper)
    base, scale = p["base"][at], p["scale"][at]
    pre = jax.nn.sigmoid(m[..., :n] * scale[0] + base[:n]) + eps
    post = 2 * jax.nn.sigmoid(m[..., n : 2 * n] * scale[1] + base[n : 2 * n])
    mix = (m[..., 2 * n :] * scale[2] + base[2 * n :]).reshape(*m.shape[:-1], n, n)
    mix = jax.nn.softmax(mix, axis=-1) + eps
    mix = mix / (mix.sum(-2, keepdims=True) + eps)

    def one(mix: jax.Array, _: None) -> tuple[jax.Array, None]:
        mix = mix / (mix.sum(-1, keepdims=True) + eps)
        return mix / (mix.sum(-2, keepdims=True) + eps), None

    mix, _ = jax.lax.scan(one, mix, None, length=hyper.rounds - 1)
    return Site(pre, post, mix)


def head_weights(
    streams: jax.Array, p: dict[str, Any], hyper: Hyper, at: Any = None
) -> jax.Array:
    """The learned final collapse: sigmoid(scale fn rms(flatten X) + base) + eps, [..., N]."""
    m = _logits(streams, p, at, hyper)
    base, scale = (p["base"], p["scale"]) if at is None else (p["base"][at], p["scale"][at])
    return jax.nn.sigmoid(m * scale + base) + hyper.eps


def collapse(pre: jax.Array, streams: jax.Array) -> jax.Array:
    """sum_i pre_i X_i in float32, in X's dtype: [..., H]."""
    x = jnp.sum(pre[..., None] * streams.astype(jnp.float32), axis=-2)
    return x.astype(streams.dtype)


def expand(s: Site, y: jax.Array, streams: jax.Array) -> jax.Array:
    """X'_j = post_j y + sum_i C_ij X_i: the streams after a sub-layer that gave y [..., H].

    Coefficients are rounded to the streams' dtype first, as published.
    """
    dtype = streams.dtype
    mixed = jnp.einsum(
        "...ij,...ih->...jh",
        s.mix.astype(dtype),
        streams,
        precision=jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    return s.post.astype(dtype)[..., None] * y[..., None, :] + mixed.astype(dtype)
