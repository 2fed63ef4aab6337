"""The indexer of Qwen sparse attention: which blocks of cached tokens each query attends to.

    q_1 .. q_h | raw = W_qk x                 # index queries, and one raw key a token
    key_b = rope_{bR}(norm(mean(raw of tokens bR .. bR + R - 1)))          # mean in float32
    score_b = sum_h relu(rope_p(norm q_h) . key_b) / sqrt(dim)             # float32

A query at position p sees its best `budget / R` blocks among the complete ones (last token at or
before p) and the (p + 1) mod R tokens behind them. The cache holds one finished key a block; raw
keys of the open block wait in a ring.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ...kernels import attention as attention_kernel
from ...kernels import indexer as kernel
from ...kernels.linear import linear
from ...mesh.context import Context
from .. import cache as caches
from ..batch import Batch
from ..params import Dim, Param
from .norm import rms_norm
from .pools import completed, declare_open, pool_tokens
from .rope import Rope, angles, rotate_half


@dataclasses.dataclass(frozen=True)
class BlockIndex:
    """Shapes of an indexer.

    Attributes:
      heads, dim: of its queries; there is one key head.
      budget: how many tokens of complete blocks are chosen.
      ratio: R, tokens a block.
    """

    heads: int
    dim: int
    budget: int
    ratio: int
    eps: float

    @property
    def width(self) -> int:
        """Most tokens that a query attends to."""
        return self.budget + self.ratio - 1


def declare_block_indexer(
    index: BlockIndex, hidden: int, layers: tuple[int, ...], prefix: str
) -> dict[str, Param]:
    """Parameters under `prefix` (with `{layer}`); every rank holds all of them."""
    key, both = Dim(index.dim), Dim((index.heads + 1) * index.dim)
    return {
        "qk": Param(f"{prefix}.index_qk_proj.weight", (both, Dim(hidden, "embed")), layers),
        "q_norm": Param(f"{prefix}.q_layernorm.weight", (key,), layers, init="zeros"),
        "k_norm": Param(f"{prefix}.k_layernorm.weight", (key,), layers, init="zeros"),
    }


def declare_block_keys(
    index: BlockIndex, layers: tuple[int, ...], prefix: str = ""
) -> dict[str, caches.Declaration]:
    """The planes "index" (a key a block) and "index_open" (raw keys of the open block)."""
    keys = caches.Paged(layers, (Dim(index.dim),), stride=index.ratio)
    planes: dict[str, caches.Declaration] = {f"{prefix}index": keys}
    if index.ratio > 1:
        planes[f"{prefix}index_open"] = declare_open(index.dim, index.ratio, layers)
    return planes


def select_blocks(
    x: jax.Array,
    p: dict[str, Any],
    at: Any,
    cache: caches.Caches,
    slot: Any,
    batch: Batch,
    index: BlockIndex,
    rope: Rope,
    context: Context,
    prefix: str = "",
) -> tuple[jax.Array | None, caches.Caches]:
    """The tokens that each query attends to, and the caches with the new blocks' keys.

    Args:
      x: [B, Q, H], what the attention reads.
      p, at: stacked parameters of `declare_block_indexer`, and this layer's place in them.
      slot: this layer's place in the planes of `declare_block_keys` under `prefix`.

    Returns:
      int32 [B, Q, budget + R - 1] positions, -1 where there are fewer; None where the page
      tables hold no more tokens than that, so that every query attends to all.
    """
    size, name, ring = index.ratio, f"{prefix}index", f"{prefix}index_open"
    both = linear(x, p["qk"], at, context=context, rows=batch.rows)
    both = both.reshape(*both.shape[:-1], index.heads + 1, index.dim)
    q, raw = both[..., :-1, :], both[..., -1, :]
    if size > 1:
        tokens, kept = pool_tokens(raw, cache[ring], slot, batch, size)
        cache = {**cache, ring: kept}
    else:
        tokens = raw[:, :, None].astype(jnp.float32)
    keys = jnp.mean(tokens, axis=-2).astype(x.dtype)
    keys = rms_norm(keys, p["k_norm"], at, eps=index.eps, zero_centred=True)
    first, count = completed(batch, size)
    begins = (first[:, None] + jnp.arange(keys.shape[1], dtype=jnp.int32)) * size
    keys = rotate_half(keys[..., None, :], *angles(rope, begins))[..., 0, :]
    plane = attention_kernel.paged_write(
        cache[name], keys, slot, batch.pages, first, count, context=context
    )
    cache = {**cache, name: plane}
    if batch.pages.shape[1] * plane.shape[2] * size <= index.width:
        return None, cache
    q = rms_norm(q, p["q_norm"], at, eps=index.eps, zero_centred=True)
    q = rotate_half(q, *angles(rope, batch.positions))
    limit = jnp.where(batch.valid, (batch.positions + 1) // size, 0)
    chosen = kernel.select(
        q, jnp.ones(q.shape[:-1], jnp.float32), plane, slot, batch.pages, limit,
        context=context, k=index.budget // size, scale=index.dim**-0.5,
    )  # fmt: skip
    inside = jnp.arange(size, dtype=jnp.int32)
    picked = jnp.where(chosen[..., None] < 0, -1, chosen[..., None] * size + inside)
    tail = limit[..., None] * size + inside[:-1]
    tail = jnp.where(batch.valid[..., None] & (tail <= batch.positions[..., None]), tail, -1)
    return jnp.concatenate([picked.reshape(*picked.shape[:2], -1), tail], -1), cache
