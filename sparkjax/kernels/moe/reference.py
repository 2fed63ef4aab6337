"""The jnp reference of the expert layer (Shazeer et al. 2017)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ...weights import formats


def experts(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    gate: Any,
    up: Any,
    down: Any,
    layer: Any,
    activation: Callable[[jax.Array], jax.Array],
    limit: float | None = None,
) -> jax.Array:
    """y[t] = sum_j weights[t, j] down_e(act(gate_e x[t]) * up_e x[t]) with e = ids[t, j].

    Experts are walked in ascending order, each over all tokens, and added in float32: a row's
    result does not depend on its company. Only one expert's weights are dequantized at a time.

    Args:
      x: [T, H].
      ids: int32 [T, k], the chosen experts of each token, distinct; -1 is none.
      weights: float32 [T, k].
      gate, up: [L, E, I, H], any format; down: [L, E, H, I].
      layer: int or int32 [].
      limit: clamp of the clamped SwiGLU: gate <= limit, |up| <= limit.

    Returns:
      [T, H] in x's dtype.
    """
    count = formats.logical_shape(gate)[1]
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None

    def through(value: jax.Array, w: Any, expert: Any) -> jax.Array:
        matrix = formats.dequantize(w, (layer, expert), x.dtype)
        return jax.lax.dot_general(
            value,
            matrix,
            (((1,), (1,)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        ).astype(x.dtype)

    def one(total: jax.Array, expert: jax.Array) -> tuple[jax.Array, None]:
        share = jnp.sum(jnp.where(ids == expert, weights, 0.0), axis=-1, keepdims=True)
        g, u = through(x, gate, expert), through(x, up, expert)
        if limit is not None:
            g, u = jnp.minimum(g, limit), jnp.clip(u, -limit, limit)
        y = through(activation(g) * u, down, expert).astype(jnp.float32)
        # A token that did not choose this expert must not see its overflow.
        return total + jnp.where(share > 0, share * y, 0.0), None

    zero = jnp.zeros(x.shape, jnp.float32)
    total, _ = jax.lax.scan(one, zero, jnp.arange(count, dtype=jnp.int32))
    return total.astype(x.dtype)
