"""DeepSeek-V4.1's indexers over compressed entries: few of them, each serving the layers behind it.

    key_w   = rope(rms_w(W_k latent_w))          # the entry before rope; at the entry's position
    score_w = sum_h (weights x)_h (dim heads)^-1/2 relu(q_h . key_w),  q = rope(W_qb ql)

One of them also picks blocks of entries (`candidates`), and those behind it look only inside.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...kernels import candidates
from ...kernels import indexer as kernel
from ...kernels.linear import linear
from ...mesh.context import Context
from ..batch import Batch
from ..params import Dim, Param
from .compress import rotate_tail
from .norm import rms_norm

ANYWHERE, PICKS, INSIDE = "anywhere", "picks", "inside"
"""Where an indexer looks: at all entries; at all, and picks blocks; inside the picked blocks."""


@dataclasses.dataclass(frozen=True)
class SharedIndex:
    """Shapes of the indexers.

    Attributes:
      top: entries that are chosen.
      blocks, size: how many blocks of how many entries are picked.
      eps: of the key norm.
    """

    heads: int
    dim: int
    top: int
    blocks: int
    size: int
    eps: float

    @property
    def scale(self) -> float:
        return (self.dim * self.heads) ** -0.5

    def chooses(self, plane: jax.Array, batch: Batch, scope: str) -> bool:
        """Whether there may be more entries (or more than stand in blocks) than are chosen."""
        count = batch.pages.shape[1] * plane.shape[2]
        return count > self.top or (scope == INSIDE and count > self.blocks * self.size)

    def picks(self, plane: jax.Array, batch: Batch) -> bool:
        """Whether there may be more blocks than are picked."""
        return batch.pages.shape[1] * plane.shape[2] > self.blocks * self.size


class Chosen(NamedTuple):
    """What the latest indexers picked for every query.

    Attributes:
      rows: int32 [B, Q, top], entries, -1: none; None where every choice is "all".
      blocks: int32 [B, Q, blocks], likewise.
    """

    rows: jax.Array | None
    blocks: jax.Array | None


def nothing_chosen(
    layers: Iterable[tuple[jax.Array, str]], batch: Batch, index: SharedIndex
) -> Chosen:
    """What stands there before the first indexer, of `layers` (key plane, scope)."""

    def empty(count: int, needed: bool) -> jax.Array | None:
        return jnp.full((*batch.tokens.shape, count), -1, jnp.int32) if needed else None

    layers = list(layers)
    rows = any(index.chooses(plane, batch, scope) for plane, scope in layers)
    blocks = any(scope == PICKS and index.picks(plane, batch) for plane, scope in layers)
    return Chosen(empty(index.top, rows), empty(index.blocks, blocks))


def declare_index_keys(
    index: SharedIndex, entry: int, layers: tuple[int, ...], prefix: str
) -> dict[str, Param]:
    """Of the layers that own entries (of `entry` channels), under `prefix` (with `{layer}`)."""
    key = Dim(index.dim)
    norm = Param(f"{prefix}.k_norm.weight", (key,), layers, dtype="float32", init="ones")
    return {"k": Param(f"{prefix}.wk.weight", (key, Dim(entry)), layers), "k_norm": norm}


def declare_index_queries(
    index: SharedIndex, hidden: int, q_rank: int, layers: tuple[int, ...], prefix: str
) -> dict[str, Param]:
    """Of the layers with an indexer."""
    heads, queries = Dim(index.heads), Dim(index.heads * index.dim)
    return {
        "q_b": Param(f"{prefix}.wq_b.weight", (queries, Dim(q_rank)), layers),
        "weights": Param(f"{prefix}.weights_proj.weight", (heads, Dim(hidden, "embed")), layers),
    }


def index_keys(
    entries: jax.Array, p: dict[str, Any], at: Any, index: SharedIndex, context: Context
) -> jax.Array:
    """[B, n, dim] of entries [B, n, D] without positions; without positions itself."""
    k = linear(entries, p["k"], at, context=context)
    return rms_norm(k, p["k_norm"], at, eps=index.eps, late_cast=True)


def select_entries(
    x: jax.Array,
    latent: jax.Array,
    p: dict[str, Any],
    at: Any,
    plane: jax.Array,
    slot: Any,
    limit: jax.Array,
    scope: str,
    chosen: Chosen,
    batch: Batch,
    index: SharedIndex,
    context: Context,
    rope: tuple[jax.Array, jax.Array],
) -> Chosen:
    """What an indexer picks among the entries whose keys stand in `plane` at `slot`.

    Args:
      x, latent: [B, Q, H] and [B, Q, q_rank], what the attention reads.
      at: this layer's place in `p`.
      limit: int32 [B, Q]: entries below it are seen.
      scope: ANYWHERE, PICKS or INSIDE.
      chosen: what earlier ones picked.
    """
    rows, blocks = chosen
    some = index.chooses(plane, batch, scope)
    picking = scope == PICKS and index.picks(plane, batch)
    if not some and not picking:
        return chosen
    q = linear(latent, p["q_b"], at, context=context, rows=batch.rows)
    q = rotate_tail(q.reshape(*q.shape[:2], index.heads, index.dim), *rope)
    weights = linear(x, p["weights"], at, context=context, rows=batch.rows).astype(jnp.float32)
    where = (q, weights, plane, slot, batch.pages, limit)
    if scope == INSIDE and blocks is not None:
        rows = candidates.select_within(
            *where, blocks, context=context, k=index.top, size=index.size, scale=index.scale
        )
    elif some:
        rows = kernel.select(*where, context=context, k=index.top, scale=index.scale)
    if picking:
        blocks = candidates.pick_blocks(
            *where, context=context, k=index.blocks, size=index.size, scale=index.scale
        )
    return Chosen(rows, blocks)
