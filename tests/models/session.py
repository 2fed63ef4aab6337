"""Several sequences fed by hand through one compiled program: the ground of the property tests."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from sparkjax.model import Model
from sparkjax.models import cache as caches
from sparkjax.models.batch import Batch

GOLDEN = Path(__file__).parent.parent / "golden"
FAMILIES = sorted(path.name for path in GOLDEN.iterdir() if (path / "golden.json").exists())
ROWS, TILE, DEPTH = 3, 16, 4
PAGES_A_ROW = 2
PAGE = 64


@dataclasses.dataclass
class Feed:
    """Tokens start .. start + count - 1 of a sequence, into a slot, over a page table."""

    tokens: np.ndarray
    start: int
    count: int
    slot: int
    table: int


class Session:
    """Caches with room for a few sequences, and the programs that feed them."""

    def __init__(self, model: Model):
        self.model = model
        page = model.page
        self.pages = -(-PAGES_A_ROW * PAGE // page) + 1
        self.sizes = caches.Sizes(ROWS * self.pages, page, ROWS, DEPTH)
        self.declared = model.family.declare_caches(model.config, model.context.ranks)
        self.cache = model.new_caches(self.sizes)

    def table(self, number: int) -> np.ndarray:
        """Page table `number`: pages that lie apart and out of order."""
        own = np.arange(self.pages, dtype=np.int32) * ROWS + number
        return np.roll(own[::-1], number)

    def feed(self, feeds: list[Feed], width: int = TILE) -> list[np.ndarray]:
        """One program call; the logits of each feed's tokens, [count, vocab]."""
        tokens = np.zeros((ROWS, width), np.int32)
        start, lengths = np.zeros(ROWS, np.int32), np.zeros(ROWS, np.int32)
        slots = np.arange(ROWS, dtype=np.int32)
        tables = np.zeros((ROWS, self.pages), np.int32)
        spans = []
        for row, feed in enumerate(feeds):
            tokens[row, : feed.count] = feed.tokens[feed.start : feed.start + feed.count]
            # What stands behind the real tokens must not matter.
            tokens[row, feed.count :] = 7 + row
            start[row], lengths[row], slots[row] = feed.start, feed.count, feed.slot
            tables[row] = self.table(feed.table)
            spans.append((feed.tokens, feed.start, feed.count))
        spans += [(np.zeros(1, np.int32), 0, 0)] * (ROWS - len(feeds))
        batch = Batch(*map(jnp.asarray, (tokens, start, lengths, tables, slots)))
        batch = dataclasses.replace(batch, prelude=self.model.prelude(spans, width))
        model = self.model
        out, self.cache = model._tile(model.params, self.cache, batch, model.context, ())
        logits = np.asarray(out[0])
        return [logits[row, : feed.count] for row, feed in enumerate(feeds)]

    def sequence(self, tokens: np.ndarray, slot: int, table: int, start: int = 0) -> np.ndarray:
        """All of `tokens` from `start` on, alone, in tiles: logits [T - start, vocab]."""
        parts = []
        for at in range(start, len(tokens), TILE):
            count = min(TILE, len(tokens) - at)
            parts += self.feed([Feed(tokens, at, count, slot, table)])
        return np.concatenate(parts)

    def snapshot(self, slot: int) -> dict[str, Any]:
        return caches.snapshot(self.cache, self.declared, slot)

    def restore(self, slot: int, saved: dict[str, Any]) -> None:
        self.cache = caches.restore(self.cache, self.declared, slot, saved)


def close(found: np.ndarray, expected: np.ndarray, tolerance: float = 1e-5) -> bool:
    """Within `tolerance` of the logits' size: other shapes of a matrix product round otherwise."""
    return float(np.abs(found - expected).max()) <= tolerance * max(1.0, float(np.abs(expected).max()))
