"""Cases of `indexer`: scores and choice of GLM-5.3's and DeepSeek-V4's indexers, prefill and decode."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from kernel_case import Case

from sparkjax.kernels.indexer import reference, select
from sparkjax.kernels.indexer.shapes import SHAPES, Shape
from sparkjax.mesh.context import Context

CONTEXT = Context("bfloat16", platform="cuda")
PAGE = 64


def cases() -> list[Case]:
    found = []
    for model, rows, tokens, length in (
        ("GLM-5.3", 1, 1024, 16384),
        ("GLM-5.3", 8, 1, 65536),
        ("DeepSeek-V4-Flash", 64, 1, 16384),
    ):
        shape = SHAPES[model]
        settings = {"k": shape.chosen, "scale": shape.dim**-0.5}
        case = Case(
            "indexer", f"{model}: {rows} x {tokens} of {length}",
            partial(_build, shape=shape, rows=rows, tokens=tokens, length=length),
            partial(_run, **settings), partial(_plain, **settings),
            rows * length * shape.dim * 2, 2 * rows * tokens * length * shape.heads * shape.dim,
            # Two scores that differ by their rounding may change places.
            tolerance=1e-2,
        )  # fmt: skip
        name = f"{case.name}, jnp"
        plain = dataclasses.replace(
            case, name=name, run=partial(_plain, **settings), reference=None
        )
        found += [case, plain]
    return found


def _build(key: jax.Array, shape: Shape, rows: int, tokens: int, length: int) -> Any:
    q, weights, plane, table = jax.random.split(key, 4)
    pages = length // PAGE
    limit = jnp.arange(length - tokens, length, dtype=jnp.int32) + 1
    return (
        jax.random.normal(q, (rows, tokens, shape.heads, shape.dim), jnp.bfloat16),
        jax.random.normal(weights, (rows, tokens, shape.heads)),
        jax.random.normal(plane, (1, rows * pages, PAGE, shape.dim), jnp.bfloat16),
        jax.random.permutation(table, rows * pages).reshape(rows, pages).astype(jnp.int32),
        jnp.broadcast_to(limit, (rows, tokens)),
    )


def _run(
    q: jax.Array,
    weights: jax.Array,
    plane: jax.Array,
    pages: jax.Array,
    limit: jax.Array,
    **settings: Any,
) -> jax.Array:
    return select(q, weights, plane, 0, pages, limit, context=CONTEXT, **settings)


def _plain(
    q: jax.Array,
    weights: jax.Array,
    plane: jax.Array,
    pages: jax.Array,
    limit: jax.Array,
    **settings: Any,
) -> jax.Array:
    return reference.select(q, weights, plane, 0, pages, limit, **settings)
