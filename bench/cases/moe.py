"""Cases of the expert layer at GLM-5.3-Flash's shapes: 288 experts of width 2,048, eight a token."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from cases._weights import size, weight
from kernel_case import Case

from sparkjax.kernels.moe import experts, reference
from sparkjax.mesh.context import Context
from sparkjax.models.layers.mlp import silu

CONTEXT = Context("bfloat16", platform="cuda")
EXPERTS, CHOSEN, HIDDEN, WIDTH = 288, 8, 4096, 2048
WANTED = 0.35
MANY = 2048


def cases() -> list[Case]:
    """At one row and eight, and at 2,048; bytes count the experts that were chosen once each."""
    kinds = ("nvfp4", "mxfp4", "fp8 block")
    few = [_case(kind, rows, "bytes") for kind in kinds for rows in (1, 8)]
    return few + [_case(kind, MANY, "flops") for kind in ("nvfp4", "fp8 block")]


def _ids(key: jax.Array, rows: int) -> jax.Array:
    """int32 [rows, CHOSEN], distinct in a row."""
    shuffle = jax.vmap(lambda k: jax.random.permutation(k, EXPERTS)[:CHOSEN])
    return shuffle(jax.random.split(key, rows)).astype(jnp.int32)


def _build(key: jax.Array, kind: str, rows: int) -> Any:
    a, b, c, *planes = jax.random.split(key, 6)
    shapes = ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
    matrices = [weight(k, kind, (1, EXPERTS), *s) for k, s in zip(planes, shapes, strict=True)]
    x = jax.random.normal(a, (rows, HIDDEN), jnp.bfloat16)
    share = jax.random.uniform(b, (rows, CHOSEN), minval=0.1)
    return (x, _ids(c, rows), share, *matrices)


def _run(*arguments: Any) -> jax.Array:
    return experts(*arguments, 0, silu, context=CONTEXT)


def _exact(x: jax.Array, *rest: Any) -> jax.Array:
    return reference.experts(x.astype(jnp.float32), *rest, 0, silu)


def _case(kind: str, rows: int, bound: str) -> Case:
    seen = float(EXPERTS * (1 - (1 - CHOSEN / EXPERTS) ** rows))
    each = 2 * size(kind, WIDTH, HIDDEN) + size(kind, HIDDEN, WIDTH)
    return Case(
        "moe", f"{kind} {EXPERTS} experts rows {rows}", partial(_build, kind=kind, rows=rows),
        _run, _exact, int(seen * each), 6 * rows * CHOSEN * HIDDEN * WIDTH,
        # Two roundings to bfloat16: between the projections and at the end.
        target=WANTED, bound=bound, tolerance=3e-3,
    )  # fmt: skip
