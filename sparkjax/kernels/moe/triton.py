"""The expert layer in Pallas Triton kernels over packed weights, from one row to thousands.

Pairs (token, choice) of one expert share a tile. Where gate and up are alike, one kernel computes
act(gate x) * up x for each tile and another the down projection; else each projection goes by itself
(`apart`). A token's choices are then added in their order. Only experts that somebody chose are read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ..linear import tuning
from ..linear.planes import Spec, planes_of, spec_of
from . import apart
from .groups import tiles
from .pairs import product


def supports(x: Any, gate: Any, up: Any, down: Any) -> str | None:
    """None if `experts` can take these, else the reason."""
    if x.dtype != jnp.bfloat16:
        return f"activations of {x.dtype}; bfloat16 is supported"
    found = [apart.specs(w) for w in (gate, up, down)]
    return next((reason for reason in found if isinstance(reason, str)), None)


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
    *,
    interpret: bool = False,
) -> jax.Array:
    """See `reference.experts`; x is bfloat16, act(gate x) * up x is rounded once (not at all in front of
    a rotation), and a token's choices are added in an order that k alone decides. Nothing is read for a
    token whose ids are -1.

    Args:
      interpret: run on a CPU, slowly.

    Raises:
      ValueError: formats that are not supported.
    """
    reason = supports(x, gate, up, down)
    if reason is not None:
        raise ValueError(f"experts: {reason}")
    tokens, k = ids.shape
    count = gate.shape[1]
    every = [spec for w in (gate, up, down) for spec in apart.specs(w) if isinstance(spec, Spec)]
    rows = tuning.expert_rows(every, tokens, k, count)
    expert, pair = tiles(ids, count, rows)

    def act(g: jax.Array, u: jax.Array) -> jax.Array:
        if limit is not None:
            g, u = jnp.minimum(g, limit), jnp.clip(u, -limit, limit)
        return activation(g) * u

    into, out = spec_of(gate), spec_of(down)
    if (
        isinstance(into, str)
        or isinstance(out, str)
        or into != spec_of(up)
        or any(spec.prepared for spec in (into, out))
    ):
        project = partial(
            apart.project, layer=layer, choice=apart.Choice(ids, expert, pair), interpret=interpret
        )
        hidden = act(project(x, gate), project(x, up))
        return project(hidden, down, share=weights, dtype=x.dtype)
    base = jnp.asarray(layer, jnp.int32) * count
    member = jnp.where(expert < 0, -1, base + expert)
    pairs = tokens * k
    first, second = (
        tuning.expert_tile(spec, tokens, rows, k, n) for spec, n in ((into, 2), (out, 1))
    )
    planes = [planes_of(gate), planes_of(up)]
    hidden = product(into, x, planes, member, pair, k, pairs, act, x.dtype, first, interpret)
    each = product(
        out, hidden, [planes_of(down)], member, pair, 1, pairs, lambda y: y, jnp.float32, second,
        interpret,
    )  # fmt: skip
    return apart.added(each, weights).astype(x.dtype)
