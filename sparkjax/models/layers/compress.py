"""Compressed cache entries (DeepSeek-V4): one row for every `ratio` tokens.

    entry_w = w_norm * rms( sum_t softmax_t(wgate x_t + ape_t) * wkv x_t )     # per channel

over the tokens of window w. With overlap the projections are twice as wide, halves A and B, and
the sum runs over the A halves of window w - 1 and the B halves of window w in one softmax
(window 0 has no A part). Without a gate (ratio 1) the entry is the normalised projection itself.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ...kernels import attention as attention_kernel
from ...kernels.linear import linear_group
from ...mesh.context import Context
from .. import cache as caches
from ..batch import Batch
from ..params import Dim, Param
from .norm import rms_norm
from .pools import completed, declare_open, pool_tokens, weighted
from .rope import Rope, angles, rotate_interleaved


@dataclasses.dataclass(frozen=True)
class Compressor:
    """Shapes of a compressor.

    Attributes:
      dim: channels of an entry.
      ratio: tokens an entry.
      overlap: whether an entry also reads the window before.
      biased: whether gates have a bias per place in the window (ape).
      dtype: of the projections' parameters.
    """

    dim: int
    ratio: int
    eps: float
    overlap: bool = False
    biased: bool = True
    dtype: str = "weight"

    @property
    def gated(self) -> bool:
        return self.ratio > 1

    @property
    def width(self) -> int:
        return self.dim * (2 if self.overlap else 1)


def declare_compressor(
    c: Compressor, hidden: int, layers: tuple[int, ...], prefix: str
) -> dict[str, Param]:
    """Parameters under `prefix` (with `{layer}`); every rank holds all of them."""
    width, embed = Dim(c.width), Dim(hidden, "embed")
    params = {
        "kv": Param(f"{prefix}.wkv.weight", (width, embed), layers, dtype=c.dtype),
        "norm": Param(f"{prefix}.norm.weight", (Dim(c.dim),), layers, dtype="float32", init="ones"),
    }
    if c.gated:
        params["gate"] = Param(f"{prefix}.wgate.weight", (width, embed), layers, dtype=c.dtype)
    if c.gated and c.biased:
        ape = (Dim(c.ratio), width)
        params["ape"] = Param(f"{prefix}.ape", ape, layers, dtype="float32", init="zeros")
    return params


def declare_entries(
    c: Compressor, layers: tuple[int, ...], name: str, reads: int | None = None
) -> dict[str, caches.Declaration]:
    """The plane `name`, and the ring `name`_open of what its next entries will be made from;
    `reads` as in `caches.Paged`."""
    planes: dict[str, caches.Declaration] = {
        name: caches.Paged(layers, (Dim(c.dim),), stride=c.ratio, reads=reads)
    }
    if c.gated:
        earlier = c.ratio if c.overlap else 0
        planes[f"{name}_open"] = declare_open(2 * c.width, c.ratio, layers, earlier)
    return planes


def compress(
    x: jax.Array,
    p: dict[str, Any],
    at: Any,
    cache: caches.Caches,
    name: str,
    slot: Any,
    batch: Batch,
    c: Compressor,
    context: Context,
) -> tuple[jax.Array, caches.Caches]:
    """The entries [B, n, dim] that x's tokens complete, before positions, and the caches with
    what is left over. Entry j is number start // ratio + j; `pools.completed` counts them."""
    wide = x if c.dtype == "weight" else x.astype(jnp.float32)
    names = ("kv", "gate") if c.gated else ("kv",)
    values, *rest = linear_group(
        wide, [p[name] for name in names], at, context=context, rows=batch.rows
    )
    if not rest:
        return rms_norm(values, p["norm"], at, eps=c.eps, late_cast=True).astype(x.dtype), cache
    ring, earlier = f"{name}_open", c.ratio if c.overlap else 0
    both = jnp.concatenate([values, *rest], -1)
    tokens, kept = pool_tokens(both, cache[ring], slot, batch, c.ratio, earlier)
    values, gates = jnp.split(tokens, 2, axis=-1)
    if c.overlap:
        ape = p["ape"][at] if c.biased else jnp.zeros((c.ratio, c.width))
        gates = gates + jnp.concatenate([ape, ape])
        # Places of the earlier window take half A, the others half B.
        from_a = (jnp.arange(2 * c.ratio) < c.ratio)[:, None]
        values = jnp.where(from_a, values[..., : c.dim], values[..., c.dim :])
        gates = jnp.where(from_a, gates[..., : c.dim], gates[..., c.dim :])
        first = completed(batch, c.ratio)[0][:, None] + jnp.arange(gates.shape[1])
        gates = jnp.where((first == 0)[..., None, None] & from_a, -jnp.inf, gates)
    elif c.biased:
        gates = gates + p["ape"][at]
    entries = rms_norm(weighted(values, gates), p["norm"], at, eps=c.eps, late_cast=True)
    return entries.astype(x.dtype), {**cache, ring: kept}


def rotate_tail(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the last 2 * cos.shape[-1] channels of x [..., heads, D], in float32."""
    cut = x.shape[-1] - 2 * cos.shape[-1]
    turned = rotate_interleaved(x[..., cut:].astype(jnp.float32), cos, sin).astype(x.dtype)
    return jnp.concatenate([x[..., :cut], turned], -1) if cut else turned


def store_entries(
    entries: jax.Array,
    cache: caches.Caches,
    name: str,
    slot: Any,
    batch: Batch,
    ratio: int,
    rope: Rope,
    context: Context,
) -> caches.Caches:
    """The caches with the completed ones among `entries` written, each rotated to the position of
    its window's first token."""
    first, count = completed(batch, ratio)
    number = first[:, None] + jnp.arange(entries.shape[1], dtype=jnp.int32)
    rows = rotate_tail(entries[..., None, :], *angles(rope, number * ratio))[..., 0, :]
    plane = attention_kernel.paged_write(
        cache[name], rows, slot, batch.pages, first, count, context=context
    )
    return {**cache, name: plane}


def visible_entries(batch: Batch, ratio: int) -> jax.Array:
    """int32 [B, Q]: how many entries a query may see (0 behind a row's real tokens)."""
    return jnp.where(batch.valid, (batch.positions + 1) // ratio, 0)
