"""Grouped-query attention whose output passes a sigmoid gate (Qwen3-Next and its successors).

q | gate = W_q x        (per head [q | gate]),   k = W_k x,   v = W_v x
y = W_o (attend(rope(norm q), rope(norm k), v) * sigmoid(gate))
"""

from __future__ import annotations

from typing import Any

import jax

from ...kernels import attention as attention_kernel
from ...kernels import sparse_gqa as sparse_kernel
from ...kernels.linear import linear_group
from ...mesh.context import Context
from .. import cache as caches
from ..batch import Batch
from ..params import Param, spread
from .attention import Heads, attend_cached, declare_attention, output
from .norm import rms_norm
from .rope import rotate_half


def declare_gated_attention(
    heads: Heads, hidden: int, layers: tuple[int, ...], prefix: str, *, bias: bool = False
) -> dict[str, Param]:
    """Parameters under `prefix` (with `{layer}`); `bias` is on q, k, v and o."""
    params = declare_attention(
        heads, hidden, layers, prefix, bias=bias, output_bias=bias, head_norms=True
    )
    q = spread(heads.layout.queries(2 * heads.dim), "heads")
    params["q"] = Param(params["q"].name, (q, params["q"].dims[1]), layers)
    if bias:
        params["q_bias"] = Param(params["q_bias"].name, (q,), layers, init="zeros")
    return params


def gated_attention(
    x: jax.Array,
    p: dict[str, Any],
    at: Any,
    cache: caches.Caches,
    names: tuple[str, str],
    slot: Any,
    batch: Batch,
    heads: Heads,
    context: Context,
    rope: tuple[jax.Array, jax.Array],
    selected: jax.Array | None = None,
) -> tuple[jax.Array, caches.Caches]:
    """One layer over normalised x [B, Q, H]; returns its output and the caches.

    Args:
      p, at: stacked parameters of `declare_gated_attention`, and this layer's place in them.
      names, slot: the planes of keys and values, and this layer's place in them.
      selected: the positions that each query attends to, int32 [B, Q, K] (-1: none), or None for
        all up to its own.
    """
    weights = (p["q"], p["k"], p["v"])
    outs = linear_group(x, weights, at, context=context, rows=batch.rows)
    found = []
    for name, y, dim in zip("qkv", outs, (2 * heads.dim, heads.dim, heads.value_dim), strict=True):
        if f"{name}_bias" in p:
            y = y + p[f"{name}_bias"][at].astype(y.dtype)
        found.append(y.reshape(*y.shape[:-1], -1, dim))
    q, k, v = found
    q, gate = q[..., : heads.dim], q[..., heads.dim :]
    q = rms_norm(q, p["q_norm"], at, eps=heads.eps, zero_centred=heads.zero_centred)
    k = rms_norm(k, p["k_norm"], at, eps=heads.eps, zero_centred=heads.zero_centred)
    q, k = rotate_half(q, *rope), rotate_half(k, *rope)
    if selected is None:
        out, cache = attend_cached(q, k, v, cache, names, batch, slot, heads, context)
    else:
        where = (slot, batch.pages, batch.start, batch.lengths)
        keys, values = (
            attention_kernel.paged_write(cache[name], rows, *where, context=context)
            for name, rows in zip(names, (k, v), strict=True)
        )
        out = sparse_kernel.sparse_attention(
            q, keys, values, slot, batch.pages, selected, context=context, scale=heads.scale
        )
        cache = {**cache, names[0]: keys, names[1]: values}
    return output(out * jax.nn.sigmoid(gate), p, at, batch, context), cache
