"""Feeds sequences to a model row by row, in a few compiled shapes, whatever its family."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparkjax.model import Model
from sparkjax.models import cache as caches
from sparkjax.models.batch import Batch
from sparkjax.weights.safetensors import SafetensorsFile

GOLDEN = Path(__file__).parent.parent / "golden"
FAMILIES = tuple(sorted(p.name for p in GOLDEN.iterdir() if (p / "golden.json").exists()))
ROWS, SLOTS, DEPTH, TOKENS = 3, 4, 4, 128
"""Rows of every batch, slots, tokens that may be taken back, tokens that a slot has pages for."""


class Feed(NamedTuple):
    """Tokens start .. start + count - 1 of one sequence, whose rings and states live in `slot`
    and whose rows in the pages of slot `paged` (default: its own)."""

    tokens: np.ndarray
    start: int
    count: int
    slot: int
    paged: int | None = None


class Driver:
    """A golden model with caches for SLOTS sequences, run in batches of ROWS rows."""

    def __init__(self, family: str):
        self.model = Model.load(GOLDEN / family, dtype="float32")
        self.declared = self.model.family.declare_caches(self.model.config, 1)
        self.per_slot = -(-TOKENS // self.model.page)
        self.sizes = caches.Sizes(SLOTS * self.per_slot, self.model.page, SLOTS, DEPTH)
        # A slot's pages lie apart and in falling order, so that nothing works by luck.
        pages = np.arange(SLOTS * self.per_slot, dtype=np.int32).reshape(self.per_slot, SLOTS)
        self.tables = pages[::-1].T.copy()
        self._step = jax.jit(self._run, donate_argnums=1)
        self.snapshot = jax.jit(lambda cache, slot: caches.snapshot(cache, self.declared, slot))
        self.restore = jax.jit(
            lambda cache, slot, saved: caches.restore(cache, self.declared, slot, saved)
        )

    def _run(self, params: Any, cache: Any, batch: Batch) -> tuple[jax.Array, Any]:
        family, config, context = self.model.family, self.model.config, self.model.context
        out = family.forward(params, cache, batch, config, context)
        return family.logits(params, out.residual, config, context), out.cache

    def caches(self, fill: float = 0.0) -> caches.Caches:
        """New caches; `fill` stands for what earlier sequences left behind."""
        return {n: jnp.full_like(a, fill) for n, a in self.model.new_caches(self.sizes).items()}

    def step(
        self, cache: caches.Caches, feeds: Sequence[Feed], width: int
    ) -> tuple[list[np.ndarray], caches.Caches]:
        """Feeds at most ROWS rows of at most `width` tokens: each row's logits [count, V]."""
        rows = [*feeds, *[Feed(np.zeros(1, np.int32), 0, 0, SLOTS - 1)] * (ROWS - len(feeds))]
        # Behind a row's real tokens stands noise, which must not matter.
        tokens = np.full((ROWS, width), 3, np.int32)
        for at, row in enumerate(rows):
            tokens[at, : row.count] = row.tokens[row.start : row.start + row.count]
        prelude = self.model.prelude([(r.tokens, r.start, r.count) for r in rows], width)
        batch = Batch(
            tokens=jnp.asarray(tokens),
            start=jnp.asarray([r.start for r in rows], jnp.int32),
            lengths=jnp.asarray([r.count for r in rows], jnp.int32),
            pages=jnp.asarray(self.tables[[r.slot if r.paged is None else r.paged for r in rows]]),
            slots=jnp.asarray([r.slot for r in rows], jnp.int32),
            prelude=prelude,
        )
        logits, cache = self._step(self.model.params, cache, batch)
        logits = np.asarray(logits)
        return [logits[at, : row.count] for at, row in enumerate(feeds)], cache

    def feed(
        self,
        cache: caches.Caches,
        tokens: np.ndarray,
        slot: int,
        *,
        start: int = 0,
        piece: int = 16,
        width: int = 16,
        paged: int | None = None,
    ) -> tuple[np.ndarray, caches.Caches]:
        """All tokens from `start` on, `piece` a step in programs of `width`: logits [T, V]."""
        found = []
        for at in range(start, len(tokens), piece):
            count = min(piece, len(tokens) - at)
            out, cache = self.step(cache, [Feed(tokens, at, count, slot, paged)], width)
            found += out
        return np.concatenate(found), cache

    def prompts(self) -> tuple[np.ndarray, np.ndarray]:
        """The golden's two prompts: their selections have no near ties."""
        return prompts(self.model.checkpoint.path.name)


@functools.cache
def driver(family: str) -> Driver:
    return Driver(family)


@functools.cache
def prompts(family: str) -> tuple[np.ndarray, np.ndarray]:
    golden = SafetensorsFile(GOLDEN / family / "golden.safetensors")
    first, second = (golden.read(f"prompt_{i}.input_ids").astype(np.int32) for i in (0, 1))
    return first, second


@functools.cache
def whole(family: str) -> np.ndarray:
    """Logits [T, V] of the first prompt, in one call."""
    return driver(family).model.forward(prompts(family)[0]).logits


def difference(out: Any, ref: Any) -> float:
    """||out - ref|| / ||ref||; infinite where anything is not finite."""
    out, ref = np.asarray(out, np.float64), np.asarray(ref, np.float64)
    if not np.isfinite(out).all():
        return float("inf")
    return float(np.linalg.norm(out - ref) / np.linalg.norm(ref))


def inexact(params: Mapping[str, Any]) -> tuple[list[Any], Any]:
    """The floating leaves of a parameter tree, and a function that puts others in their place."""
    leaves, tree = jax.tree.flatten(params)
    places = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.inexact)]

    def put(new: Sequence[Any]) -> Any:
        merged = list(leaves)
        for place, leaf in zip(places, new, strict=True):
            merged[place] = leaf
        return jax.tree.unflatten(tree, merged)

    return [leaves[i] for i in places], put


def over(chosen: Sequence[str], *values: Any) -> Any:
    """Parametrises a test over all families (and `values`); those that are not among `chosen` are
    slow, and so are all values but the first."""
    cases = []
    for family in FAMILIES:
        for at, value in enumerate(values or (None,)):
            default = family in chosen and at == 0
            args = (family,) if not values else (family, value)
            label = family if not values else f"{family}-{value}"
            marks = () if default else pytest.mark.slow
            cases.append(pytest.param(*args, id=label, marks=marks))
    return pytest.mark.parametrize("family" if not values else ("family", "value"), cases)
