"""Cases of `sparse_attention`: GLM-5.3's latent rows, 2,048 chosen for each query of 16,384."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from kernel_case import Case

from sparkjax.kernels.sparse_attention import latent_attention, reference
from sparkjax.kernels.sparse_attention.shapes import SHAPES
from sparkjax.mesh.context import Context

CONTEXT = Context("bfloat16", platform="cuda")
SHAPE = SHAPES["GLM-5.3"]
PAGE, LENGTH = 64, 16384


def cases() -> list[Case]:
    found = []
    for heads, rows, tokens in ((64, 8, 1), (16, 64, 1), (64, 1, 2048), (16, 1, 2048)):
        pairs = rows * tokens * heads * SHAPE.chosen
        # Rows that several queries chose are counted once in prefill.
        chosen = rows * SHAPE.chosen if tokens == 1 else rows * LENGTH
        case = Case(
            "sparse_attention", f"{heads} heads: {rows} x {tokens}",
            partial(_build, heads=heads, rows=rows, tokens=tokens), _run,
            _exact if tokens == 1 else None,
            chosen * SHAPE.dim * 2 + rows * tokens * heads * 2 * (SHAPE.dim + SHAPE.value_dim),
            2 * pairs * (SHAPE.dim + SHAPE.value_dim),
        )  # fmt: skip
        found.append(case)
        if tokens > 1:
            name = f"{case.name}, gathered (jnp)"
            found.append(dataclasses.replace(case, name=name, run=_gathered, reference=None))
    return found


def _build(key: jax.Array, heads: int, rows: int, tokens: int) -> Any:
    q, plane, table, choice = jax.random.split(key, 4)
    pages = LENGTH // PAGE

    def choose(key: jax.Array) -> jax.Array:
        return jnp.sort(jax.random.permutation(key, LENGTH)[: SHAPE.chosen])

    selected = jax.lax.map(choose, jax.random.split(choice, rows * tokens))
    return (
        jax.random.normal(q, (rows, tokens, heads, SHAPE.dim), jnp.bfloat16),
        jax.random.normal(plane, (1, rows * pages, PAGE, SHAPE.dim), jnp.bfloat16),
        jax.random.permutation(table, rows * pages).reshape(rows, pages).astype(jnp.int32),
        selected.reshape(rows, tokens, -1).astype(jnp.int32),
    )


def _settings(plane: jax.Array, pages: jax.Array, selected: jax.Array) -> dict[str, Any]:
    return {
        "scale": 256**-0.5,
        "value_dim": SHAPE.value_dim,
        "plane": plane,
        "layer": 0,
        "pages": pages,
        "selected": selected,
    }


def _run(q: jax.Array, *rest: jax.Array) -> jax.Array:
    return latent_attention(q, context=CONTEXT, **_settings(*rest))


def _gathered(q: jax.Array, *rest: jax.Array) -> jax.Array:
    return reference.latent_attention(q, **_settings(*rest))


def _exact(q: jax.Array, *rest: jax.Array) -> jax.Array:
    return reference.latent_attention(q.astype(jnp.float32), **_settings(*rest))
