"""Cache rows that stand for several tokens: a learned average, written when its last token is in.

    row_b = sum_t softmax_t(gate_t + ape_t) * value_t      # per channel, over the pool's tokens

Tokens of a pool that is not complete yet wait in a ring, addressed by position like everything
else; so a pool may be cut anywhere by tiles, and rolling back just completes it again.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .. import cache as caches
from ..batch import Batch
from ..params import Dim
from .short_conv import read_tail


def declare_open(
    channels: int, size: int, layers: tuple[int, ...], earlier: int = 0
) -> caches.Ring:
    """What waits of pools of `size` tokens: values and gates (`channels` in all) of a token, and
    of the `earlier` tokens that the pool also reads.

    float32, so that a pool's row does not depend on where tiles cut it.
    """
    return caches.Ring(layers, (Dim(channels),), size - 1 + earlier, dtype="float32")


def completed(batch: Batch, size: int) -> tuple[jax.Array, jax.Array]:
    """(first, count), int32 [B]: the pools that the batch's tokens complete, in order."""
    first = batch.start // size
    return first, (batch.start + batch.lengths) // size - first


def pool_tokens(
    x: jax.Array, ring: jax.Array, slot: Any, batch: Batch, size: int, earlier: int = 0
) -> tuple[jax.Array, jax.Array]:
    """The tokens of the pools that this batch may complete, from its own x [B, Q, C] and the ring.

    Args:
      earlier: also take that many tokens in front of each pool (zeros before the sequence).

    Returns:
      float32 [B, n, earlier + size, C], and the ring with x's tokens kept. Pool j of the result is
      number start // size + j; which are complete, `completed` tells.
    """
    back = size - 1 + earlier
    tail = read_tail(ring, slot, batch, back)
    z = jnp.concatenate([tail, x.astype(jnp.float32)], axis=1)
    pools = (x.shape[1] + size - 1) // size
    # z[0] stands at position start - back.
    first = (batch.start // size) * size - earlier - (batch.start - back)
    offset = jnp.arange(pools)[:, None] * size + jnp.arange(earlier + size)
    index = first[:, None, None] + offset
    index = jnp.clip(index, 0, z.shape[1] - 1).reshape(x.shape[0], -1, 1)
    tokens = jnp.take_along_axis(z, index, axis=1)
    tokens = tokens.reshape(x.shape[0], pools, earlier + size, x.shape[-1])
    return tokens, caches.write_ring(ring, slot, x, batch)


def weighted(values: jax.Array, gates: jax.Array) -> jax.Array:
    """sum_t softmax_t(gates) * values over the second last axis, float32 [B, n, C]."""
    return jnp.sum(jax.nn.softmax(gates, axis=-2) * values, axis=-2)
