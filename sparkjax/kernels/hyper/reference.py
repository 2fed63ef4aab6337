"""The jnp reference of a hyper-connection site's coefficients (Xie et al. 2026)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ...weights import formats

Coefficients = tuple[jax.Array, jax.Array, jax.Array]


def coefficients(
    streams: jax.Array,
    fn: Any,
    base: jax.Array,
    scale: jax.Array,
    layer: Any,
    *,
    rounds: int,
    eps: float,
    norm_eps: float,
) -> Coefficients:
    """What collapses N streams into one, gives a sub-layer's output to each, and mixes them.

    In float32, with m = fn rms(flatten X) over N * H values:

        pre  = sigmoid(scale_0 m[:N] + base[:N]) + eps
        post = 2 sigmoid(scale_1 m[N:2N] + base[N:2N])
        C    = softmax_rows(scale_2 m[2N:] + base[2N:]) + eps, then `normalised`

    Args:
      streams: [..., N, H].
      fn: a weight [L, (2 + N) N, N H]; base: [L, (2 + N) N]; scale: [L, 3].
      layer: int or int32 [].
      rounds: of the normalisation; eps: its floor; norm_eps: that of the norm over all streams.

    Returns:
      float32 (pre [..., N], post [..., N], C [..., N, N]).
    """
    n = streams.shape[-2]
    flat = streams.reshape(*streams.shape[:-2], -1).astype(jnp.float32)
    flat = flat * jax.lax.rsqrt(jnp.mean(flat * flat, axis=-1, keepdims=True) + norm_eps)
    weight = formats.dequantize(fn, layer, jnp.float32)
    m = jnp.einsum("...k,nk->...n", flat, weight, precision=jax.lax.Precision.HIGHEST)
    b, s = base[layer], scale[layer]
    pre = jax.nn.sigmoid(m[..., :n] * s[0] + b[:n]) + eps
    post = 2 * jax.nn.sigmoid(m[..., n : 2 * n] * s[1] + b[n : 2 * n])
    mix = (m[..., 2 * n :] * s[2] + b[2 * n :]).reshape(*m.shape[:-1], n, n)
    return pre, post, normalised(jax.nn.softmax(mix, axis=-1), rounds, eps)


def normalised(mix: jax.Array, rounds: int, eps: float) -> jax.Array:
    """A softmax of each row made doubly stochastic by `rounds` of Sinkhorn and Knopp (1967), of the
    first of which the softmax is the half: float32 [..., N, N]."""
    mix = mix + eps
    mix = mix / (mix.sum(-2, keepdims=True) + eps)

    def one(_: Any, mix: jax.Array) -> jax.Array:
        mix = mix / (mix.sum(-1, keepdims=True) + eps)
        return mix / (mix.sum(-2, keepdims=True) + eps)

    return jax.lax.fori_loop(0, rounds - 1, one, mix)
