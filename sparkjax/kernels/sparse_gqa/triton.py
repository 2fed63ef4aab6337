"""Grouped-query attention to chosen keys on a GPU: the kernel of `sparse_attention.triton`."""

from __future__ import annotations

from typing import Any

import jax

from ..sparse_attention import triton as sparse


def supports(q: Any, k: Any, v: Any) -> str | None:
    """None if `sparse_attention` can take these, else the reason."""
    reason = sparse.supports(q, k, q.shape[-1]) or sparse.supports(q, v, v.shape[-1])
    if reason is None and q.shape[2] % k.shape[3]:
        return f"heads do not fit: q {q.shape}, k {k.shape}"
    return reason


def sparse_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    layer: Any,
    pages: jax.Array,
    selected: jax.Array,
    *,
    scale: float,
    interpret: bool = False,
) -> jax.Array:
    """[B, Q, Hq, Dv]; arguments as in `reference.sparse_attention`."""
    return sparse.attend(
        q, (), (k, v), layer, pages, selected, None,
        scale=scale, value_dim=v.shape[-1], interpret=interpret,
    )  # fmt: skip
