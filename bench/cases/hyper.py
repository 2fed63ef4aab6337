"""Cases of `hyper` at real models' shapes: decode of one and 64 rows, a prefill tile, and the same
through XLA."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from kernel_case import Case

from sparkjax.kernels.hyper import coefficients, reference
from sparkjax.kernels.hyper.shapes import SHAPES, Shape
from sparkjax.mesh.context import Context

FORM = {"eps": 1e-6, "norm_eps": 1e-5}
KERNEL = partial(coefficients, layer=0, context=Context("bfloat16", platform="cuda"), **FORM)
XLA = partial(reference.coefficients, layer=0, **FORM)


def cases() -> list[Case]:
    found = []
    for name, rows in (("GLM-5.3-Flash", 1), ("DeepSeek-V4.1-Flash", 64), ("GLM-5.3-Flash", 2048)):
        shape = SHAPES[name]
        inputs, outputs = shape.streams * shape.hidden, (2 + shape.streams) * shape.streams
        case = Case(
            "hyper", f"{name}: {rows} rows", partial(_build, shape=shape, rows=rows),
            partial(KERNEL, rounds=shape.rounds), partial(XLA, rounds=shape.rounds),
            inputs * (2 * rows + outputs * jnp.dtype(shape.dtype).itemsize) + 4 * rows * outputs,
            2 * rows * inputs * outputs, tolerance=2e-5,
        )  # fmt: skip
        other = dataclasses.replace(
            case, name=f"{case.name}, jnp", run=case.reference, reference=None
        )
        found += [case, other]
    return found


def _build(key: jax.Array, shape: Shape, rows: int) -> Any:
    n, inputs = shape.streams, shape.streams * shape.hidden
    x, fn, base, scale = jax.random.split(key, 4)
    outputs = (2 + n) * n
    weight = jax.random.normal(fn, (1, outputs, inputs)) / inputs**0.5
    return (
        jax.random.normal(x, (rows, n, shape.hidden), jnp.bfloat16),
        weight.astype(shape.dtype),
        jax.random.normal(base, (1, outputs)),
        1 + jax.random.uniform(scale, (1, 3)),
    )
