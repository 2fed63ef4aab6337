"""Cases of `kda` at GLM-5.3-Flash's shape: decode of 64 rows, prefill of 2,048 tokens, and the same one
token at a time."""

from __future__ import annotations

from functools import partial
from typing import Any

from cases import _states
from kernel_case import Case

from sparkjax.kernels.kda import kda, reference
from sparkjax.kernels.kda.shapes import SHAPES
from sparkjax.mesh.context import Context

SHAPE = SHAPES["GLM-5.3-Flash"]
TOKENS = 2048
KERNEL = partial(kda, context=Context("bfloat16", platform="cuda"))


def cases() -> list[Case]:
    heads, dim = SHAPE.heads, SHAPE.dim
    build = partial(_states.build, keys=heads, values=heads, dim=dim, channels=(dim,))
    row = heads * dim * (4 * 2 + 4) + 4 * heads
    flops = TOKENS * heads * 6 * dim * dim
    many = {"build": partial(build, rows=1, tokens=TOKENS), "bytes": TOKENS * row, "flops": flops}
    return [
        Case(
            "kda", f"step, 64 rows x {_states.STEPS}", partial(build, rows=64, tokens=1),
            partial(_states.run, KERNEL, _states.STEPS),
            partial(_states.run, reference.kda_cached, _states.STEPS, exact=True),
            _states.state_bytes(64, heads, dim), target=0.6,
        ),
        Case("kda", f"{TOKENS} tokens", run=partial(_states.run, KERNEL, 1),
             reference=partial(_states.run, reference.kda_cached, 1, exact=True), **many),
        Case("kda", f"{TOKENS} tokens, one by one (jnp)", run=_one_by_one, reference=None, **many),
    ]  # fmt: skip


def _one_by_one(*args: Any) -> Any:
    *given, plane = args
    return reference.recurrent(*given, plane[0, :, 0])
