"""Short depthwise causal convolutions in front of a recurrence, with their tail of past inputs.

How a family uses it, for one convolution of width W over C channels:

    params: "conv": declare_conv(channels, W, layers, "model.layers.{layer}.x.conv1d.weight")
    caches: "conv": declare_tail(channels, W, layers)
    block:  y, cache = short_conv(x, p["conv"], at, cache, "conv", slot, batch, context)

`channels` is the Dim of the inputs (with units where it is spread over ranks; x is then this
rank's share). The tail is a ring of the last (W - 1) * dilation inputs, addressed by position, so
it rolls back, snapshots and restores like every ring; it is float32 whatever the compute dtype.
Several convolutions over the same tokens (q, k, v) may share one call: concatenate inputs and
weights along the channels.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ...kernels import short_conv as kernel
from ...mesh.context import Context
from .. import cache as caches
from ..batch import Batch
from ..params import Dim, Param


def declare_conv(
    channels: Dim, width: int, layers: tuple[int, ...], name: str, **kwargs: Any
) -> Param:
    """The taps [C, 1, W] as torch's Conv1d stores them."""
    return Param(name, (channels, Dim(1), Dim(width)), layers, **kwargs)


def declare_tail(
    channels: Dim, width: int, layers: tuple[int, ...], dilation: int = 1
) -> caches.Ring:
    """The past inputs that the next token may read."""
    return caches.Ring(layers, (channels,), (width - 1) * dilation, dtype="float32")


def read_tail(ring: jax.Array, layer: Any, batch: Batch, rows: int) -> jax.Array:
    """[B, rows, C]: the inputs at positions start - rows .. start - 1, zeros before position 0."""
    position = batch.start[:, None] - rows + jnp.arange(rows, dtype=jnp.int32)
    found = ring[layer, batch.slots[:, None], position % ring.shape[2]]
    return jnp.where((position >= 0)[..., None], found, 0)


def short_conv(
    x: jax.Array,
    weight: jax.Array,
    at: Any,
    cache: caches.Caches,
    name: str,
    slot: Any,
    batch: Batch,
    context: Context,
    *,
    dilation: int = 1,
    activation: str = "silu",
) -> tuple[jax.Array, caches.Caches]:
    """act(conv(x)) [B, Q, C], and the caches with the new inputs kept.

    Args:
      x: [B, Q, C].
      weight: the taps, stacked: [L, C, 1, W].
      at: this layer's place in `weight`; None for taps [C, 1, W] of one layer.
      name, slot: the ring, and this layer's place in it.
    """
    taps = (weight if at is None else weight[at]).squeeze(-2)
    tail = read_tail(cache[name], slot, batch, (taps.shape[-1] - 1) * dilation)
    y = kernel.short_conv(x, tail, taps, context=context, dilation=dilation, activation=activation)
    return y, {**cache, name: caches.write_ring(cache[name], slot, x, batch)}
