"""Cases of `attention`: decode, verification and prefill over pages, against PyTorch's
scaled_dot_product_attention over keys and values that lie together."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from kernel_case import Case

from sparkjax.kernels.attention import paged_attention, reference
from sparkjax.kernels.attention.shapes import SHAPES, Shape
from sparkjax.mesh.context import Context

CONTEXT = Context("bfloat16", platform="cuda")
PAGE = 64
CASES = (
    ("Flint, full", 64, 1, 4095),
    ("GLM-4.7", 64, 1, 4095),
    ("GLM-4.7", 1, 1, 8191),
    ("Qwen3.8-27B", 16, 1, 4095),
    ("GLM-4.7", 8, 4, 8188),
    ("GLM-4.7", 1, 2048, 0),
    ("GLM-4.7", 1, 2048, 6144),
)
"""Model, rows, new tokens a row, tokens before them."""


def cases() -> list[Case]:
    return [_case(*case) for case in CASES]


def _case(model: str, rows: int, tokens: int, before: int) -> Case:
    shape = SHAPES[model]
    total = before + tokens
    kv = rows * total * shape.kv_heads * (shape.dim + shape.value_dim) * 2
    pairs = rows * shape.heads * tokens * (before + (tokens + 1) / 2)
    size = {"rows": rows, "tokens": tokens, "before": before}
    settings = {"scale": shape.dim**-0.5, "start": before}
    return Case(
        "attention", f"{model}: {rows} x {tokens} after {before}", partial(_build, shape=shape, **size),
        partial(_run, **settings), None if tokens > 64 else partial(_exact, **settings),
        kv + 2 * rows * tokens * shape.heads * (shape.dim + shape.value_dim),
        int(2 * pairs * (shape.dim + shape.value_dim)),
        peer=partial(_peer, shape=shape, **size),
    )  # fmt: skip


def _build(key: jax.Array, shape: Shape, rows: int, tokens: int, before: int) -> Any:
    q, k, v, table = jax.random.split(key, 4)
    pages = -(-(before + tokens) // PAGE)
    plane = (1, rows * pages, PAGE, shape.kv_heads)
    return (
        jax.random.normal(q, (rows, tokens, shape.heads, shape.dim), jnp.bfloat16),
        jax.random.normal(k, (*plane, shape.dim), jnp.bfloat16),
        jax.random.normal(v, (*plane, shape.value_dim), jnp.bfloat16),
        jax.random.permutation(table, rows * pages).reshape(rows, pages).astype(jnp.int32),
    )


def _ends(q: jax.Array, start: int) -> tuple[jax.Array, jax.Array]:
    rows, tokens = q.shape[:2]
    return jnp.full(rows, start, jnp.int32), jnp.full(rows, tokens, jnp.int32)


def _run(
    q: jax.Array, k: jax.Array, v: jax.Array, pages: jax.Array, scale: float, start: int
) -> jax.Array:
    return paged_attention(q, k, v, 0, pages, *_ends(q, start), context=CONTEXT, scale=scale)


def _exact(
    q: jax.Array, k: jax.Array, v: jax.Array, pages: jax.Array, scale: float, start: int
) -> jax.Array:
    """In float32, a row at a time."""

    def one(row: tuple[jax.Array, jax.Array]) -> jax.Array:
        q, pages = (x[None] for x in row)
        return reference.paged_attention(
            q.astype(jnp.float32), k, v, 0, pages, *_ends(q, start), scale=scale
        )[0]

    return jax.lax.map(one, (q, pages))


def _peer(
    torch: Any, count: int, shape: Shape, rows: int, tokens: int, before: int
) -> list[Callable[[], Any]]:
    from torch.nn.attention.bias import causal_lower_right
    from torch.nn.functional import scaled_dot_product_attention as attend

    total = before + tokens
    mask = causal_lower_right(tokens, total) if tokens > 1 else None

    def one() -> Callable[[], Any]:
        def normal(heads: int, length: int, dim: int) -> Any:
            return torch.randn(rows, heads, length, dim, device="cuda", dtype=torch.bfloat16)

        q = normal(shape.heads, tokens, shape.dim)
        k, v = (normal(shape.kv_heads, total, dim) for dim in (shape.dim, shape.value_dim))
        return lambda: attend(q, k, v, attn_mask=mask, enable_gqa=True)

    return [one() for _ in range(count)]
