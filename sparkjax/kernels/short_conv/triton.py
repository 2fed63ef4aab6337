"""The short convolution on a GPU: one pass over the inputs, no joined copy of tail and inputs."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .. import pallas as tools
from ..pallas import plgpu

CHANNELS = 256


def supports(x: Any, weight: Any) -> str | None:
    """None if `short_conv` can take these, else the reason."""
    return None if weight.shape[-1] > 1 else "one tap only; two and more are supported"


def short_conv(
    x: jax.Array,
    tail: jax.Array,
    weight: jax.Array,
    *,
    dilation: int = 1,
    activation: str = "silu",
    interpret: bool = False,
) -> jax.Array:
    """[B, Q, C] in x's dtype; arguments as in `reference.short_conv`."""
    b, count, channels = x.shape
    tokens = min(tools.power(count), 16)
    body = functools.partial(_kernel, dilation=dilation, activation=activation, tokens=tokens)
    run = tools.call(
        body,
        (-(-channels // CHANNELS), -(-count // tokens), b),
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        warps=4,
        interpret=interpret,
        name="short_conv",
    )
    return run(x, tail, weight)


def _kernel(
    x_ref: Any,
    tail_ref: Any,
    weight_ref: Any,
    out_ref: Any,
    *,
    dilation: int,
    activation: str,
    tokens: int,
) -> None:
    tile, number, b = (pl.program_id(axis) for axis in range(3))
    _, count, channels = x_ref.shape
    earlier, width = tail_ref.shape[1], weight_ref.shape[1]
    channel = tile * CHANNELS + jnp.arange(CHANNELS, dtype=jnp.int32)
    inside = channel < channels
    token = number * tokens + jnp.arange(tokens, dtype=jnp.int32)
    there = (token < count)[:, None] & inside[None, :]
    at = jnp.minimum(channel, channels - 1)
    y = jnp.zeros((tokens, CHANNELS), jnp.float32)
    for tap in range(width):
        # Place in [tail | x].
        place = jnp.minimum(token, count - 1) + tap * dilation
        old = (place < earlier)[:, None] & there
        before = plgpu.load(
            tail_ref.at[b, jnp.clip(place, 0, max(earlier - 1, 0))[:, None], at[None, :]],
            mask=old,
            other=0.0,
        )
        now = plgpu.load(
            x_ref.at[b, jnp.maximum(place - earlier, 0)[:, None], at[None, :]],
            mask=(place >= earlier)[:, None] & there,
            other=0.0,
        )
        z = jnp.where(old, before.astype(jnp.float32), now.astype(jnp.float32))
        y += z * plgpu.load(weight_ref.at[at, tap]).astype(jnp.float32)[None, :]
    if activation == "silu":
        y = y / (1.0 + jnp.exp(-y))
    out = jnp.where(token < count, token, count)[:, None]
    channel = jnp.where(inside, channel, channels)[None, :]
    plgpu.store(out_ref.at[b, out, channel], y.astype(out_ref.dtype), mask=there)
