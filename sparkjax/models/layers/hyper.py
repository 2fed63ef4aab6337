"""Manifold-constrained hyper-connections (mHC, Xie et al. 2026): several residual streams.

A site stands around every sub-layer. From the streams X_1 .. X_N of a token it computes
`pre`, `post` and C (`kernels/hyper`); then

    x    = sum_i pre_i X_i                                    # collapse: the sub-layer's input
    X'_j = post_j y + sum_i C_ij X_i                          # y: the sub-layer's output

Two-pass families (glm5_next, deepseek_v4) collapse with the site's own `pre`; the single-pass one
(deepseek_v41) collapses with the previous site's, so the pieces are separate functions.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...kernels import hyper as kernels
from ...mesh.context import Context
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


def site(streams: jax.Array, p: dict[str, Any], at: Any, hyper: Hyper, context: Context) -> Site:
    """The coefficients of one site; streams are [..., N, H]."""
    found = kernels.coefficients(
        streams, p["fn"], p["base"], p["scale"], at, context=context,
        rounds=hyper.rounds, eps=hyper.eps, norm_eps=hyper.norm_eps,
    )  # fmt: skip
    return Site(*found)


def head_weights(streams: jax.Array, p: dict[str, Any], hyper: Hyper, at: Any = None) -> jax.Array:
    """The learned final collapse: sigmoid(scale fn rms(flatten X) + base) + eps, [..., N]."""
    flat = rms(streams.reshape(*streams.shape[:-2], -1), hyper.norm_eps)
    fn = formats.dequantize(p["fn"], at, jnp.float32)
    m = jnp.einsum("...k,nk->...n", flat, fn, precision=jax.lax.Precision.HIGHEST)
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
    mix = s.mix.astype(dtype).astype(jnp.float32)
    # Element by element, so that XLA makes one kernel of it, and a token's bits are its own.
    mixed = functools.reduce(
        operator.add,
        (
            mix[..., i, :, None] * streams[..., i, None, :].astype(jnp.float32)
            for i in range(streams.shape[-2])
        ),
    )
    return s.post.astype(dtype)[..., None] * y[..., None, :] + mixed.astype(dtype)
