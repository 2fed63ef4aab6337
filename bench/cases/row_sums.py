"""Cases of `row_sums`: one pass over a vocabulary, and all filters of a sampling step, which are some
twenty such passes; the same through XLA."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from kernel_case import Case

from sparkjax.engine import sampler
from sparkjax.kernels.row_sums import reference, upto
from sparkjax.kernels.row_sums.shapes import SHAPES
from sparkjax.mesh.context import Context

VOCAB = SHAPES["Qwen3-8B"]
GPU = Context("bfloat16", platform="cuda")


def cases() -> list[Case]:
    found = []
    for rows in (1, 8):
        nbytes = rows * VOCAB * 8
        found += [
            Case("row_sums", f"{rows} rows, 16 edges", partial(_build, rows=rows),
                 partial(upto, context=GPU), reference.upto, nbytes),
            Case("row_sums", f"{rows} rows, top-k and top-p", partial(_logits, rows=rows),
                 partial(_kept, context=GPU), partial(_kept, context=Context()), 18 * nbytes),
            Case("row_sums", f"{rows} rows, top-k and top-p, jnp", partial(_logits, rows=rows),
                 partial(_kept, context=Context()), None, 18 * nbytes),
        ]  # fmt: skip
    return found


def _build(key: jax.Array, rows: int) -> Any:
    keys, weights, edges = jax.random.split(key, 3)
    most = 1 << 30
    return (
        jax.random.randint(keys, (rows, VOCAB), 0, most),
        jax.random.uniform(weights, (rows, VOCAB)),
        jax.random.randint(edges, (rows, 16), 0, most),
    )


def _logits(key: jax.Array, rows: int) -> Any:
    logits = 3 * jax.random.normal(key, (rows, VOCAB))
    return (logits - jnp.max(logits, axis=-1, keepdims=True),)


def _kept(scaled: jax.Array, context: Context) -> jax.Array:
    """What top-k 50, top-p 0.95 and min-p 0.01 leave, as numbers."""
    rows, width = scaled.shape[0], -(-VOCAB // 32)
    full = partial(jnp.full, (rows,))
    options = sampler.SamplingRows(
        temperature=full(1.0), top_k=full(50), top_p=full(0.95), min_p=full(0.01),
        presence=full(0.0), frequency=full(0.0), repetition=full(1.0),
        seed=jnp.zeros((rows, 2), jnp.uint32), position=full(0), logprobs=full(False),
        bias_ids=jnp.full((rows, 1), -1), bias_values=jnp.zeros((rows, 1)),
        mask=jnp.full((rows, width), 0xFFFFFFFF, jnp.uint32),
    )  # fmt: skip
    return sampler._kept(scaled, full(50), options, context).astype(jnp.float32)
