"""The online softmax inside of GPU kernels (Milakov & Gimelshein 2018; Dao et al. 2022).

Logits are times log2 e. What a row does not see multiplies by one and adds zero, so a row has the
same bits whatever its neighbours in a tile see.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from . import pallas as tools

HIDDEN = -1e30
"""The logit of a key that is not seen: finite, so that nothing turns into NaN."""
LOG2E = math.log2(math.e)

Partial = tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]
"""Of some keys: the largest logit [M], the sum of weights [M], the weighted values [M, part] each."""


def start(rows: int, value_dim: int) -> Partial:
    """Of no keys."""
    values = tuple(jnp.zeros((rows, size), jnp.float32) for _, size in tools.parts(value_dim))
    return jnp.full((rows,), HIDDEN, jnp.float32), jnp.zeros((rows,), jnp.float32), values


def add(
    found: Partial,
    logits: jax.Array,
    seen: jax.Array,
    values: Sequence[jax.Array],
    precision: Any,
) -> Partial:
    """With a block of keys more: logits [M, K] (times log2 e), seen [M, K], values [K, part] each."""
    top, total, sums = found
    logits = jnp.where(seen, logits, HIDDEN)
    new = jnp.maximum(top, jnp.max(logits, axis=1))
    weights = jnp.where(seen, jnp.exp2(logits - new[:, None]), 0.0)
    shrink = jnp.exp2(top - new)
    sums = tuple(
        x * shrink[:, None] + tools.dot(weights.astype(value.dtype), value, precision)
        for x, value in zip(sums, values, strict=True)
    )
    return new, total * shrink + jnp.sum(weights, axis=1), sums


def merge(a: Partial, b: Partial) -> Partial:
    """Of two runs of keys."""
    top = jnp.maximum(a[0], b[0])
    left, right = jnp.exp2(a[0] - top), jnp.exp2(b[0] - top)
    values = tuple(x * left[:, None] + y * right[:, None] for x, y in zip(a[2], b[2], strict=True))
    return top, a[1] * left + b[1] * right, values


def finish(found: Partial, sink: jax.Array | None) -> tuple[jax.Array, ...]:
    """The attention's values [M, part] each; zeros where nothing was seen. `sink`: None, or one
    more logit [M] (natural) that attends to nothing."""
    top, total, values = found
    if sink is not None:
        new = jnp.maximum(top, sink * LOG2E)
        shrink = jnp.exp2(top - new)
        total = total * shrink + jnp.exp2(sink * LOG2E - new)
        values = tuple(x * shrink[:, None] for x in values)
    total = jnp.where(total == 0.0, 1.0, total)
    return tuple(x / total[:, None] for x in values)
