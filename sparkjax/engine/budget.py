"""Whether a model fits into the memory there is, asked before any of it is taken.

The headers of a checkpoint say how many bytes each rank will hold; declarations say the rest. Where
memory is one for CPU and device, taking too much does not fail: the machine stops answering. So a
start that does not fit is refused with what takes the room, and with the largest pool that would fit.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import jax

from ..mesh.context import Context
from ..models import cache as caches
from . import memory
from .limits import DoesNotFit
from .memory import GIB, Item, MemoryPlan

log = logging.getLogger(__name__)
CPU_RESERVE = 256 << 20
"""Bytes left alone on a CPU."""
TILE = 512
"""Tokens of a tile that the workspace is made for where the settings name none."""


def plan(
    family: Any,
    config: Any,
    context: Context,
    weights: Mapping[int, Mapping[str, int]],
    *,
    slots: int,
    kv_tokens: int | None = None,
    page_size: int | None = None,
    tile: int | None = None,
    room: int | None = None,
) -> tuple[MemoryPlan, int]:
    """What this process will take of one memory, and the largest pool of cache pages that fits.

    Args:
      weights: for each rank of this process, bytes by weight format.
      slots, kv_tokens, page_size: see `sparkjax.settings.Engine`; without kv_tokens the pool is
        chosen later from what is left, and counts as one page here.
      tile: tokens of the largest prefill tile.
      room: bytes there are (default: `memory.available` of this process's first device).

    Returns:
      The table, and tokens.
    """
    device = jax.local_devices()[0]
    room = memory.available(device) if room is None else room
    # The ranks of one process share a CPU's memory; devices have one each.
    together = len(weights) if device.platform == "cpu" else 1
    planes = family.declare_caches(config, context.ranks)
    if page_size is None:
        page_size = caches.page_size(planes)
    pages = 1 if kv_tokens is None else -(-kv_tokens // page_size)
    names = {name for one in weights.values() for name in one}
    held = {name: [one.get(name, 0) for one in weights.values()] for name in sorted(names)}
    reserve = CPU_RESERVE if device.platform == "cpu" else memory.RESERVE
    hidden = getattr(config, "hidden", 4096)
    work = 16 * 4 * (tile or TILE) * hidden + 3 * 4 * max(slots, 2) * config.vocab
    fixed = [
        *(Item("weights", n, sum(b) if together > 1 else max(b)) for n, b in held.items()),
        *_times(memory.slot_items(slots, config.vocab), together),
        Item("workspace", "temporaries of a step, estimated", work * together),
        Item("reserve", "left to the system", reserve),
    ]
    sizes = caches.Sizes(pages, page_size, slots)
    pool = memory.cache_items(planes, sizes, context.ranks, context.dtype)
    left = (room - sum(item.nbytes for item in fixed)) // together
    largest = memory.largest_pool(planes, page_size, slots, context.ranks, context.dtype, left)
    return MemoryPlan((*fixed, *_times(pool, together)), room), largest.tokens


def require(*args: Any, **options: Any) -> MemoryPlan:
    """`plan`, refused where it does not fit.

    Raises:
      DoesNotFit: names the largest items and the largest engine.kv_tokens that fits.
    """
    table, tokens = plan(*args, **options)
    for item in sorted(table.items, key=lambda item: -item.nbytes):
        log.debug("memory: %s, %s: %.3f GiB", item.kind, item.name, item.nbytes / GIB)
    log.info(
        "memory: %.2f GiB of %.2f planned; %s",
        table.total / GIB, table.available / GIB, table.largest(4),
    )  # fmt: skip
    if table.free < 0:
        least = f"the largest engine.kv_tokens that fits is {tokens}"
        if not tokens:
            least = "it does not fit with any engine.kv_tokens; use more ranks or a smaller format"
        raise DoesNotFit(
            f"the model does not fit: {table.total / GIB:.2f} GiB are needed and "
            f"{table.available / GIB:.2f} GiB are free. The largest: {table.largest(4)}; {least}"
        )
    return table


def _times(items: list[Item], count: int) -> list[Item]:
    return [Item(item.kind, item.name, item.nbytes * count) for item in items]

