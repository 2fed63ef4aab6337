"""What the cases of `gated_delta` and `kda` share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

STEPS = 8
"""Decode steps in one run. The plane of states is updated in place, but a benchmark's buffers stay as
they are, so that one copy of it stands in front of each run; it is counted as the traffic it is."""


def build(
    key: jax.Array, rows: int, tokens: int, keys: int, values: int, dim: int, channels: tuple
) -> Any:
    q, k, v, g, beta, plane = jax.random.split(key, 6)
    decay = jax.random.normal(g, (rows, tokens, values, *channels))
    return (
        jax.random.normal(q, (rows, tokens, keys, dim), jnp.bfloat16),
        jax.random.normal(k, (rows, tokens, keys, dim), jnp.bfloat16),
        jax.random.normal(v, (rows, tokens, values, dim), jnp.bfloat16),
        -5 * jax.nn.sigmoid(decay),
        jax.nn.sigmoid(jax.random.normal(beta, (rows, tokens, values))),
        jax.random.normal(plane, (1, rows, 1, values, dim, dim)),
    )


def run(form: Callable[..., Any], steps: int, *args: Any, exact: bool = False) -> Any:
    """Outputs of the last step and the states, `steps` times over the same tokens."""
    *given, plane = args
    if exact:
        given = [x.astype(jnp.float32) for x in given]
    rows, tokens = given[0].shape[:2]
    start, lengths = jnp.ones(rows, jnp.int32), jnp.full(rows, tokens, jnp.int32)

    def step(_: Any, found: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return form(*given, found[1], 0, jnp.arange(rows, dtype=jnp.int32), start, lengths)

    nothing = jnp.zeros(given[2].shape, given[2].dtype)
    return jax.lax.fori_loop(0, steps, step, (nothing, plane))


def state_bytes(rows: int, values: int, dim: int) -> int:
    """Of a run of `STEPS` decode steps: states read and written, and the copy of them."""
    return (STEPS + 1) * 2 * 4 * rows * values * dim * dim
