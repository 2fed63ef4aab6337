"""Cases of `gated_delta` at Qwen3.8-27B's shape: decode of 64 rows, prefill of 2,048 tokens, and the
same one token at a time."""

from __future__ import annotations

from functools import partial
from typing import Any

from cases import _states
from kernel_case import Case

from sparkjax.kernels.gated_delta import gated_delta, reference
from sparkjax.kernels.gated_delta.shapes import SHAPES
from sparkjax.mesh.context import Context

SHAPE = SHAPES["Qwen3.8-27B"]
TOKENS = 2048
KERNEL = partial(gated_delta, context=Context("bfloat16", platform="cuda"))


def cases() -> list[Case]:
    values, dim = SHAPE.values, SHAPE.dim
    build = partial(_states.build, keys=SHAPE.keys, values=values, dim=dim, channels=())
    row = 2 * dim * (2 * SHAPE.keys + 2 * values) + 8 * values
    flops = TOKENS * values * 6 * dim * dim
    many = {"build": partial(build, rows=1, tokens=TOKENS), "bytes": TOKENS * row, "flops": flops}
    exact = partial(_states.run, reference.gated_delta_cached)
    return [
        Case(
            "gated_delta", f"step, 64 rows x {_states.STEPS}", partial(build, rows=64, tokens=1),
            partial(_states.run, KERNEL, _states.STEPS), partial(exact, _states.STEPS, exact=True),
            _states.state_bytes(64, values, dim), target=0.6,
        ),
        Case("gated_delta", f"{TOKENS} tokens", run=partial(_states.run, KERNEL, 1),
             reference=partial(exact, 1, exact=True), **many),
        Case("gated_delta", f"{TOKENS} tokens, one by one (jnp)", run=_one_by_one, reference=None,
             **many),
    ]  # fmt: skip


def _one_by_one(*args: Any) -> Any:
    *given, plane = args
    return reference.recurrent(*given, plane[0, :, 0])
