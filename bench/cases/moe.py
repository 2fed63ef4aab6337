"""Cases of the expert layer: GLM-5.3-Flash's in several formats, and EXL3 at the shapes of its recipes."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from cases._weights import cut, size, weight
from kernel_case import Case

from sparkjax.kernels.moe import experts, reference
from sparkjax.kernels.moe.shapes import SHAPES, Shape
from sparkjax.mesh.context import Context
from sparkjax.models.layers.mlp import silu
from sparkjax.weights.formats import COLS, ROWS

CONTEXT = Context("bfloat16", platform="cuda")
FLASH = SHAPES["GLM-5.3-Flash"]
CUT = (("GLM-5.3, one of 3", "exl3 3 bits"), ("DeepSeek-V4.1-Flash, one of 4", "exl3 3.5 bits"))
WANTED = 0.35
MANY = 2048


def cases() -> list[Case]:
    """At one row and eight, and at 2,048; bytes count the experts that were chosen once each."""
    kinds = ("nvfp4", "mxfp4", "fp8 block", "exl3 2 bits")
    few = [_case(FLASH, kind, rows, "bytes") for kind in kinds for rows in (1, 8)]
    few += [_case(SHAPES[name], kind, rows, "bytes") for name, kind in CUT for rows in (1, 8)]
    many = ("nvfp4", "fp8 block", "exl3 2 bits")
    return few + [_case(FLASH, kind, MANY, "flops") for kind in many]


def _ids(key: jax.Array, shape: Shape, rows: int) -> jax.Array:
    """int32 [rows, chosen], distinct in a row."""
    shuffle = jax.vmap(lambda k: jax.random.permutation(k, shape.experts)[: shape.chosen])
    return shuffle(jax.random.split(key, rows)).astype(jnp.int32)


def _build(key: jax.Array, shape: Shape, kind: str, rows: int) -> Any:
    a, b, c, *planes = jax.random.split(key, 6)
    width = shape.whole or shape.width
    sides = ((width, shape.hidden), (width, shape.hidden), (shape.hidden, width))
    lead = (1, shape.experts)
    matrices = [weight(k, kind, lead, *s) for k, s in zip(planes, sides, strict=True)]
    if shape.whole:
        axes = (ROWS, ROWS, COLS)
        matrices = [cut(m, axis, shape.width) for m, axis in zip(matrices, axes, strict=True)]
    x = jax.random.normal(a, (rows, shape.hidden), jnp.bfloat16)
    share = jax.random.uniform(b, (rows, shape.chosen), minval=0.1)
    return (x, _ids(c, shape, rows), share, *matrices)


def _run(*arguments: Any) -> jax.Array:
    return experts(*arguments, 0, silu, context=CONTEXT)


def _exact(x: jax.Array, *rest: Any) -> jax.Array:
    return reference.experts(x.astype(jnp.float32), *rest, 0, silu)


def _case(shape: Shape, kind: str, rows: int, bound: str) -> Case:
    seen = float(shape.experts * (1 - (1 - shape.chosen / shape.experts) ** rows))
    width = shape.whole or shape.width
    each = 2 * size(kind, width, shape.hidden) + size(kind, shape.hidden, width)
    return Case(
        "moe", f"{kind} {shape.experts} experts rows {rows}",
        partial(_build, shape=shape, kind=kind, rows=rows), _run, _exact, int(seen * each),
        6 * rows * shape.chosen * shape.hidden * shape.width,
        # Two roundings to bfloat16: between the projections and at the end.
        target=WANTED, bound=bound, tolerance=3e-3,
    )  # fmt: skip
