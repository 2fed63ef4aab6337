"""What every family file provides, and what a forward pass returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from ..mesh.context import Context
from . import cache as caches
from . import tables
from .batch import Batch
from .params import Tree

CAPTURES = ("embed", "mixer_out", "mlp_out", "residual")
"""Activations that every family can return by name: the embedding [B, Q, H], and stacked over
layers the mixer's and the MLP's output before they are added, and the residual after the layer."""


class Output(NamedTuple):
    """What a forward pass returns.

    Attributes:
      residual: [B, Q, ...], the raw residual after the last layer, all streams.
      taps: [len(taps), B, Q, ...], the residual after the tapped layers; None without taps.
      cache: the updated caches.
      captured: the named activations that were asked for.
    """

    residual: jax.Array
    taps: jax.Array | None
    cache: caches.Caches
    captured: dict[str, jax.Array]


class ModelConfig(Protocol):
    """Every family's frozen configuration has at least these fields."""

    @property
    def vocab(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def max_positions(self) -> int: ...
    @property
    def eos(self) -> tuple[int, ...]: ...


class Family(Protocol):
    """A family's module.

    It may set `ROW_INVARIANT = True` when every product over a row's values goes through operations
    with a row-invariant implementation (`linear`, `paged_attention`); the engine may then decode at
    several row counts without changing a bit.
    """

    @staticmethod
    def read_config(values: Mapping[str, Any]) -> Any:
        """A frozen, hashable Config from a checkpoint's config.json. Raises UnsupportedConfig."""

    @staticmethod
    def declare(config: Any, ranks: int) -> Tree:
        """The declarations of all parameters, as a nested dict."""

    @staticmethod
    def declare_caches(config: Any, ranks: int) -> dict[str, caches.Declaration]:
        """The declarations of all caches."""

    @staticmethod
    def forward(
        params: Any,
        cache: caches.Caches,
        batch: Batch,
        config: Any,
        context: Context,
        taps: tuple[int, ...] = (),
        capture: Collection[str] = (),
    ) -> Output:
        """All layers; caches are read at and written behind `batch.start`."""

    @staticmethod
    def final(params: Any, residual: jax.Array, config: Any, context: Context) -> jax.Array:
        """The final collapse and norm: what the vocabulary projection reads, [..., H]."""

    @staticmethod
    def logits(
        params: Any,
        residual: jax.Array,
        config: Any,
        context: Context,
        rows: jax.Array | None = None,
    ) -> jax.Array:
        """float32 [..., vocab] from the raw residual."""


@dataclasses.dataclass(frozen=True)
class Drafts:
    """How a family's prediction layers are run (its constant DRAFTS; these are the defaults).

    Attributes:
      reads: what the first depth reads of a token: "final" (`Family.final`), or "residual" (the
        raw residual after the last layer).
      chained: depth K reads what depth K - 1 carried, one row further. Else depth K runs over the
        same rows and the same states, with the token ids shifted once more.
    """

    reads: str = "final"
    chained: bool = True


class PredictionLayers(Protocol):
    """What a family with prediction layers provides besides."""

    DRAFTS: Drafts

    @staticmethod
    def declare_draft(config: Any, ranks: int) -> Tree:
        """Their parameters, `params["draft"]` when loaded; empty without such layers."""

    @staticmethod
    def declare_draft_caches(config: Any, ranks: int) -> dict[str, caches.Declaration]:
        """Their caches, with names of their own ("draft_...")."""

    @staticmethod
    def draft(
        params: Any,
        cache: caches.Caches,
        batch: Batch,
        hidden: jax.Array,
        config: Any,
        context: Context,
        depth: int = 0,
    ) -> tuple[jax.Array, jax.Array, caches.Caches]:
        """(float32 logits [B, Q, vocab], what the next depth reads, caches). `batch.tokens[b, t]`
        follows the token whose state is `hidden[b, t]`; both stand at batch.start + t."""


class HostTables(Protocol):
    """What a family with tables on the host provides besides (see `tables`)."""

    @staticmethod
    def declare_tables(config: Any) -> Mapping[str, tables.Table | tables.Derived]:
        """The tables by name: mapped from the checkpoint, never device arrays."""

    @staticmethod
    def prelude_shapes(config: Any) -> dict[str, tuple[int, ...]]:
        """What `prelude` returns for each token, by name: shapes of float32 arrays."""

    @staticmethod
    def prelude(
        config: Any, opened: tables.Tables, tokens: np.ndarray, start: int, count: int
    ) -> dict[str, np.ndarray]:
        """float32 [count, *shape] by name: the rows of positions start .. start + count - 1 of one
        sequence, given all its token ids so far (int [at least start + count])."""
