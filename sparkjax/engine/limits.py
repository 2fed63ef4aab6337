"""From settings and a model to the scheduler's limits, within the memory there is."""

from __future__ import annotations

import logging
from typing import Any

import jax
import jax.numpy as jnp

from ..kernels.linear import native
from ..weights import formats
from . import memory
from .records import Limits

log = logging.getLogger(__name__)

CONTEXT = 8192
"""Default bound on a sequence's length, in tokens."""
POOL_SHARE = 0.5
"""How much of the memory that is left the default cache pool may take."""


class LimitsError(ValueError):
    """Settings of the engine that do not go with the model; names the setting and what is allowed."""


class DoesNotFit(LimitsError):
    """The caches asked for are larger than the memory that is left."""


def default_tiles(model: Any) -> tuple[int, ...]:
    """Prefill tiles that suit the platform."""
    return (64, 512) if model.context.platform == "cuda" else (16, 64, 128)


def row_invariant(model: Any) -> bool:
    """Whether a decode row has the same bits at every row count of the step.

    XLA's own products do not keep that, the native kernels do: so the family must send every
    product through operations that have one, and every weight must be of a kind that it takes.
    """
    context = model.context
    if context.platform != "cpu" or not getattr(model.family, "ROW_INVARIANT", False):
        return False
    if any(name in ("linear", "attention") for name, _ in context.kernels):
        return False
    x = jax.ShapeDtypeStruct((1, 1), jnp.dtype(context.dtype))
    leaves = jax.tree.leaves(model.params, is_leaf=formats.is_quantized)
    return all(native.supports(x, leaf) is None for leaf in leaves if leaf.ndim > 1)


def default_rows(model: Any, slots: int) -> tuple[int, ...]:
    """Row counts of the decode step: one, so that company never changes a bit; two where decode is
    row-invariant, so that a few streams do not pay for all slots."""
    most = max(slots, 2)
    return (2, most) if most > 2 and row_invariant(model) else (most,)


def make_limits(
    model: Any,
    *,
    slots: int = 8,
    context: int | None = None,
    kv_tokens: int | None = None,
    page_size: int | None = None,
    tiles: tuple[int, ...] | None = None,
    rows: tuple[int, ...] | None = None,
    queue: int = 64,
    busy_tiles: int = 1,
    idle_tiles: int = 4,
    admission: str = "reserve",
    window: int = 256,
    room: int | None = None,
) -> Limits:
    """The limits that settings (see `sparkjax.settings.Engine`) and a loaded model give.

    Args:
      page_size: tokens a page (default: 64, or what the model's pooled caches need).
      room: bytes that caches may take (default: `memory.available`).

    Raises:
      LimitsError: a context beyond the model's, or tiles that do not go with the page size.
      DoesNotFit: names the sizes and the largest kv_tokens that would fit.
    """
    own = model.config.max_positions
    page_size = model.page if page_size is None else page_size
    context = min(own, CONTEXT) if context is None else context
    if context > own:
        raise LimitsError(f"engine.context is {context}; the model's own limit is {own} tokens")
    tiles = default_tiles(model) if tiles is None else tiles
    if rows is None:
        rows = default_rows(model, slots)
    elif len(rows) > 1 and not row_invariant(model):
        log.warning(
            "engine.rows is %s: this model's steps round differently at other row counts, so a "
            "request may not get the same tokens alone and in company; one count keeps that",
            list(rows),
        )
    if max(tiles) % page_size and page_size % max(tiles):
        raise LimitsError(
            f"engine.tiles end at {max(tiles)}; that and engine.page_size {page_size} must divide"
        )

    def limits(tokens: int) -> Limits:
        return Limits(
            slots=slots,
            pages=-(-tokens // page_size),
            page_size=page_size,
            context=context,
            queue=queue,
            tiles=tuple(tiles),
            rows=tuple(rows),
            busy_tiles=busy_tiles,
            idle_tiles=idle_tiles,
            admission=admission,
            window=window,
        )

    room = memory.available(jax.local_devices()[0]) if room is None else room
    ranks, dtype = model.context.ranks, model.context.dtype
    declared = model.family.declare_caches(model.config, ranks)
    pool = memory.largest_pool(declared, page_size, slots, ranks, dtype, room)
    fits = pool.tokens if pool.page else slots * context
    if kv_tokens is None:
        kv_tokens = min(slots * context, int(fits * POOL_SHARE) // page_size * page_size)
        kv_tokens = max(kv_tokens, min(context, fits))
    if kv_tokens > fits or pool.fixed > room:
        raise DoesNotFit(
            f"engine.kv_tokens {kv_tokens} needs {(pool.fixed + pool.page * kv_tokens / page_size) / 2**30:.2f} GiB "
            f"of caches ({pool.fixed / 2**30:.2f} GiB of it for {slots} slots); {room / 2**30:.2f} GiB are "
            f"free: the largest engine.kv_tokens that fits is {fits}"
        )
    return limits(kv_tokens)
