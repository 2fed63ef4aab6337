"""Cases of `short_conv` at GLM-5.3-Flash's shape, and the same through XLA."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from kernel_case import Case

from sparkjax.kernels.short_conv import reference, short_conv
from sparkjax.kernels.short_conv.shapes import SHAPES
from sparkjax.mesh.context import Context

SHAPE = SHAPES["GLM-5.3-Flash"]


def cases() -> list[Case]:
    found = []
    for rows, tokens in ((64, 1), (1, 2048)):
        case = Case(
            "short_conv", f"{rows} x {tokens}", partial(_build, rows=rows, tokens=tokens),
            partial(short_conv, context=Context("bfloat16", platform="cuda")), reference.short_conv,
            SHAPE.channels * (rows * (4 * tokens + 4 * (SHAPE.width - 1)) + 4 * SHAPE.width),
        )  # fmt: skip
        name = f"{case.name}, jnp"
        found += [
            case,
            dataclasses.replace(case, name=name, run=reference.short_conv, reference=None),
        ]
    return found


def _build(key: jax.Array, rows: int, tokens: int) -> Any:
    x, tail, weight = jax.random.split(key, 3)
    return (
        jax.random.normal(x, (rows, tokens, SHAPE.channels), jnp.bfloat16),
        jax.random.normal(tail, (rows, SHAPE.width - 1, SHAPE.channels)),
        jax.random.normal(weight, (SHAPE.channels, SHAPE.width)),
    )
