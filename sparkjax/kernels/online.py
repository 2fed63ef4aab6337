"""The online softmax inside of GPU kernels (Milakov & Gimelshein 2018; Dao et al. 2022).

Logits are times log2 e. What a row does not see multiplies by one and adds zero, so a row has the
same bits whatever its neighbours in a tile see.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
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
    fine: bool = False,
) -> Partial:
    """With a block of keys more.

    Args:
      logits: [M, K], times log2 e; seen: bool [M, K]; values: [K, part] each.
      fine: where values are bfloat16, weights are multiplied as two bfloat16 numbers (16 bits
        instead of 8).
    """
    top, total, sums = found
    logits = jnp.where(seen, logits, HIDDEN)
    new = jnp.maximum(top, jnp.max(logits, axis=1))
    weights = jnp.where(seen, jnp.exp2(logits - new[:, None]), 0.0)
    shrink = jnp.exp2(top - new)
    dtype = values[0].dtype
    rounded = [weights.astype(dtype)]
    if fine and dtype == jnp.bfloat16:
        rounded.append((weights - rounded[0].astype(jnp.float32)).astype(dtype))
    sums = tuple(
        _sum([x * shrink[:, None], *(tools.dot(part, value, precision) for part in rounded)])
        for x, value in zip(sums, values, strict=True)
    )
    return new, total * shrink + jnp.sum(weights, axis=1), sums


def join(
    tops: Sequence[jax.Array],
    totals: Sequence[jax.Array],
    load: Callable[[int, tuple[int, int], jax.Array], jax.Array],
    value_dim: int,
) -> Partial:
    """Of several runs of keys together.

    Args:
      tops, totals: [M] of each run.
      load: (number of the run, part, which rows to load: bool [M]) -> its values [M, part]. Rows
        that no key was added to need not have been written, and are not loaded.
    """
    top = functools.reduce(jnp.maximum, tops)
    scales = [jnp.exp2(x - top) for x in tops]
    total = _sum(x * scale for x, scale in zip(totals, scales, strict=True))
    values = tuple(
        _sum(
            load(number, part, totals[number] > 0.0) * scale[:, None]
            for number, scale in enumerate(scales)
        )
        for part in tools.parts(value_dim)
    )
    return top, total, values


def _sum(terms: Iterable[jax.Array]) -> jax.Array:
    return functools.reduce(operator.add, terms)


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
