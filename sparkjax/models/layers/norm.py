"""Root-mean-square norms."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def rms(x: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) over the last axis, float32 (Zhang and Sennrich 2019)."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


def rms_norm(
    x: jax.Array,
    weight: jax.Array,
    layer: Any = None,
    *,
    eps: float,
    zero_centred: bool = False,
    late_cast: bool = False,
) -> jax.Array:
    """A scaled RMS norm over the last axis; the result has x's dtype.

    Args:
      weight: [H], or [L, H] with `layer`.
      zero_centred: scale by 1 + weight, all in float32 with one cast (gemma3, Qwen3.5).
      late_cast: multiply in float32 and cast once (DeepSeek-V4, flint); else the normalised
        value is cast to x's dtype first and then multiplied (llama, qwen3, GLM, MiMo).
    """
    w = weight if layer is None else weight[layer]
    y = rms(x, eps)
    if zero_centred:
        return (y * (1.0 + w.astype(jnp.float32))).astype(x.dtype)
    if late_cast:
        return (y * w.astype(jnp.float32)).astype(x.dtype)
    return y.astype(x.dtype) * w.astype(x.dtype)
