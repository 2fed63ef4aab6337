"""Attention over one row a token that is key and value of every head (DeepSeek-V4).

    q  = rope(wq_b ql) per head, ql = rms_w(wq_a x)        # V4: each head normalised before rope
    kv = rope(rms_w(wkv x))                                # rope on the last channels of both
    o  = attend(q, window rows and compressed entries), with one sink logit a head
    y  = wo_b concat_g(wo_a_g unrope(o_g))                 # heads form consecutive groups

The values carry positions in their last channels, so the output is rotated back by the query's
angle. Rows of the last `window` tokens live in a ring; entries come from `compress`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ...kernels import sparse_attention as sparse_kernel
from ...kernels.attention.reference import visible
from ...kernels.grouped_linear import grouped
from ...kernels.linear import linear, linear_group
from ...mesh.context import Context
from ...mesh.units import even
from .. import cache as caches
from ..batch import Batch
from ..params import Dim, Param, spread
from .compress import rotate_tail
from .norm import rms, rms_norm

ALIGN = 32
"""Rows of a block that a kernel takes at a time, at most."""


@dataclasses.dataclass(frozen=True)
class SharedKV:
    """Shapes of one model's attention.

    Attributes:
      dim: channels of a head, a row and an entry.
      window: rows that a query sees, itself included.
      groups: of heads in front of the output projection; `o_rank` channels each behind it.
      head_norm: whether every query head is normalised.
    """

    heads: int
    dim: int
    q_rank: int
    window: int
    groups: int
    o_rank: int
    eps: float
    head_norm: bool


def declare_shared_kv(
    shape: SharedKV, hidden: int, layers: tuple[int, ...], prefix: str, ranks: int
) -> dict[str, Param]:
    """Parameters under `prefix` (with `{layer}`). Groups of heads are spread over ranks."""
    embed, latent = Dim(hidden, "embed"), Dim(shape.q_rank)
    each = shape.heads // shape.groups

    def groups(size: int) -> Dim:
        return spread(even(shape.groups, ranks, size), "heads")

    def matrix(name: str, out: Dim, into: Dim) -> Param:
        return Param(f"{prefix}.{name}.weight", (out, into), layers)

    def norm(name: str, size: int) -> Param:
        dims = (Dim(size),)
        return Param(f"{prefix}.{name}.weight", dims, layers, dtype="float32", init="ones")

    return {
        "q_a": matrix("wq_a", latent, embed),
        "q_norm": norm("q_norm", shape.q_rank),
        "q_b": matrix("wq_b", groups(each * shape.dim), latent),
        "kv": matrix("wkv", Dim(shape.dim), embed),
        "kv_norm": norm("kv_norm", shape.dim),
        "sinks": Param(
            f"{prefix}.attn_sink", (groups(each),), layers, dtype="float32", init="zeros"
        ),
        "o_a": matrix("wo_a", groups(shape.o_rank), Dim(each * shape.dim)),
        "o_b": matrix("wo_b", embed, groups(shape.o_rank)),
    }


def declare_window(shape: SharedKV, layers: tuple[int, ...]) -> caches.Ring:
    """The rows that the next token may still see; every rank holds all of them."""
    return caches.Ring(layers, (Dim(shape.dim),), shape.window - 1)


def latents(
    x: jax.Array, p: dict[str, Any], at: Any, shape: SharedKV, batch: Batch, context: Context
) -> tuple[jax.Array, jax.Array]:
    """What normalised x [B, Q, H] is projected to: [B, Q, q_rank], which the query heads and the
    indexer's queries are made from, and [B, Q, dim], the key and value before its norm."""
    y, kv = linear_group(x, (p["q_a"], p["kv"]), at, context=context, rows=batch.rows)
    return rms_norm(y, p["q_norm"], at, eps=shape.eps, late_cast=True), kv


def shared_kv(
    kv: jax.Array,
    latent: jax.Array,
    p: dict[str, Any],
    at: Any,
    cache: caches.Caches,
    name: str,
    slot: Any,
    batch: Batch,
    shape: SharedKV,
    context: Context,
    rope: tuple[jax.Array, jax.Array],
    entries: jax.Array | None = None,
    entries_at: Any = None,
    limit: jax.Array | None = None,
    selected: jax.Array | None = None,
) -> tuple[jax.Array, caches.Caches]:
    """One attention layer; its output [B, Q, H] and the caches.

    Args:
      latent, kv: `latents` of its input.
      at: this layer's place in `p`; `slot` in the window cache `name`.
      rope: (cos, sin) float32 [B, Q, rope / 2].
      entries: None, or the plane of compressed entries, `entries_at` this layer's place in it.
      limit: int32 [B, Q]: entries below it are seen ...
      selected: ... or, where given, only these of them: int32 [B, Q, k], -1 for none.
    """
    b, count, _ = kv.shape
    cos, sin = rope
    q = linear(latent, p["q_b"], at, context=context, rows=batch.rows).reshape(
        b, count, -1, shape.dim
    )
    if shape.head_norm:
        q = rms(q, shape.eps).astype(q.dtype)
    q = rotate_tail(q, cos, sin)
    kv = rms_norm(kv, p["kv_norm"], at, eps=shape.eps, late_cast=True)
    kv = rotate_tail(kv[..., None, :], cos, sin)[..., 0, :]
    ring = cache[name]
    rows, seen = _window(kv, ring, slot, batch, shape.window)
    more: dict[str, Any] = {}
    if selected is not None:
        more = {"plane": entries, "layer": entries_at, "pages": batch.pages, "selected": selected}
    elif entries is not None and limit is not None:
        found = caches.gather_pages(entries, entries_at, batch).astype(kv.dtype)
        below = jnp.arange(found.shape[1]) < limit[..., None]
        # In front, whole blocks of them: their places do not depend on how many tokens are new.
        pad = -found.shape[1] % ALIGN
        found = jnp.pad(found, ((0, 0), (0, pad), (0, 0)))
        below = jnp.pad(below & batch.valid[..., None], ((0, 0), (0, 0), (0, pad)))
        rows = jnp.concatenate([found, rows], 1)
        seen = jnp.concatenate([below, seen], -1)
    out = sparse_kernel.latent_attention(
        q, context=context, scale=shape.dim**-0.5, value_dim=shape.dim, rows=rows, seen=seen,
        sinks=p["sinks"][at], **more,
    )  # fmt: skip
    cache = {**cache, name: caches.write_ring(ring, slot, kv, batch)}
    return _output(rotate_tail(out, cos, -sin), p, at, shape, batch, context), cache


def _window(
    kv: jax.Array, ring: jax.Array, slot: Any, batch: Batch, window: int
) -> tuple[jax.Array, jax.Array]:
    """(rows [B, N, dim] that the new tokens' windows hold, in order, and bool [B, Q, N], who sees
    them).

    The first stands at a multiple of `ALIGN`: a kernel that takes rows in blocks finds the same
    ones in a block however many tokens are new, so that they do not change a sum's bits.
    """
    start = batch.start[:, None]
    first = jnp.maximum(start - (window - 1), 0) // ALIGN * ALIGN
    count = kv.shape[1]
    key = first + jnp.arange(window - 1 + count + ALIGN - 1, dtype=jnp.int32)
    old = ring[slot, batch.slots[:, None], key % ring.shape[2]].astype(kv.dtype)
    new = jnp.take_along_axis(kv, jnp.clip(key - start, 0, count - 1)[..., None], axis=1)
    rows = jnp.where((key < start)[..., None], old, new)
    key = jnp.where(key < start + batch.lengths[:, None], key, -1)
    return rows, visible(batch.positions, key, window) & batch.valid[..., None]


def _output(
    out: jax.Array,
    p: dict[str, Any],
    at: Any,
    shape: SharedKV,
    batch: Batch,
    context: Context,
) -> jax.Array:
    """Heads [B, Q, heads, dim] through their groups' projections and the common one: [B, Q, H]."""
    b, count = out.shape[:2]
    # The groups of this rank: heads a group * dim of each.
    each = out.reshape(b, count, -1, shape.heads // shape.groups * shape.dim)
    low = grouped(each, p["o_a"], at, context=context)
    low = low.reshape(b, count, -1)
    return context.all_reduce(linear(low, p["o_b"], at, context=context, rows=batch.rows))
