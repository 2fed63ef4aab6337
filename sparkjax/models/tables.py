"""Tables too large for the device: rows looked up on the host, shipped with the batch.

Some families remember n-grams in tables of 48 to 189 GiB, of which a token reads a few rows. Such
a family declares its tables (`declare_tables`) as it declares its parameters; they stay in the
mapped checkpoint and never become device arrays. Before a step the host runs the family's
`prelude` over each sequence's token ids, and the rows travel as `batch.prelude`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..weights.errors import CheckpointError

RANDOM_LIMIT = 1 << 28
"""Elements of the largest table that a model with random weights may make up."""


@dataclasses.dataclass(frozen=True)
class Table:
    """One table of the checkpoint.

    Attributes:
      name: the tensor's name; with `{shard}`, row shards 0, 1, 2, ... as many as there are.
      shape: of the whole table: (rows, width), or any shape of a small array.
      also: other spellings of the name.
      scale: names of the tensor that its rows are multiplied by, the first that is there: one
        number, or [rows, groups] for equal groups of columns (sharded as the table is).
      optional: absent in some checkpoints; then it is not among the opened tables.
    """

    name: str
    shape: tuple[int, ...]
    also: tuple[str, ...] = ()
    scale: tuple[str, ...] = ()
    optional: bool = False


@dataclasses.dataclass(frozen=True)
class Derived:
    """An array that is computed once, when the model is loaded.

    Attributes:
      build: the checkpoint's tokenizer (None for a model with random weights) -> the array.
    """

    build: Callable[[Any], np.ndarray]


Declared = Mapping[str, Table | Derived]


class Rows:
    """An opened table: its row shards, as they lie in the mapped files."""

    def __init__(self, shards: Sequence[np.ndarray], scale: Rows | float | None = None):
        self._shards, self._scale = list(shards), scale
        self._ends = np.cumsum([len(shard) for shard in self._shards])

    @property
    def shape(self) -> tuple[int, ...]:
        return (int(self._ends[-1]), *self._shards[0].shape[1:])

    def whole(self) -> np.ndarray:
        """All of a small table, as stored."""
        return np.concatenate(self._shards)

    def take(self, ids: np.ndarray) -> np.ndarray:
        """float32 [*ids.shape, width]: rows `ids`, with their scales applied."""
        flat = np.asarray(ids, np.int64).reshape(-1)
        found = np.empty((len(flat), *self.shape[1:]), np.float32)
        shard_of = np.searchsorted(self._ends, flat, side="right")
        for shard in np.unique(shard_of):
            here = shard_of == shard
            first = self._ends[shard] - len(self._shards[shard])
            found[here] = self._shards[shard][flat[here] - first].astype(np.float32)
        if isinstance(self._scale, Rows):
            scale = self._scale.take(flat)
            groups = found.reshape(*scale.shape, -1) * scale[..., None]
            found = groups.reshape(found.shape)
        elif self._scale is not None:
            found *= np.float32(self._scale)
        return found.reshape(*np.shape(ids), *self.shape[1:])


Tables = dict[str, Any]
"""Opened tables by name: Rows, and arrays for what was derived."""


def declared(family: Any, config: Any) -> Declared:
    """A family's tables; most have none."""
    return family.declare_tables(config) if hasattr(family, "declare_tables") else {}


def tensors(declared: Declared, checkpoint: Any) -> list[str]:
    """The checkpoint's tensors that the tables are made of."""
    found = []
    for table in declared.values():
        if isinstance(table, Table):
            found += _spelling((table.name, *table.also), checkpoint)
            found += _spelling(table.scale, checkpoint)
    return found


def open_tables(declared: Declared, checkpoint: Any, tokenizer: Callable[[], Any]) -> Tables:
    """The declared tables over the checkpoint's mapped files.

    Args:
      tokenizer: gives the checkpoint's tokenizer; called only where something is derived from it.

    Raises:
      CheckpointError: a table is missing, or of another shape than the config asks for.
    """
    opened: Tables = {}
    for key, table in declared.items():
        if isinstance(table, Derived):
            opened[key] = table.build(tokenizer())
            continue
        names = _spelling((table.name, *table.also), checkpoint)
        if not names:
            if table.optional:
                continue
            raise CheckpointError(f"{checkpoint.path}: missing tensor: {table.name}")
        scales = [checkpoint.read(name) for name in _spelling(table.scale, checkpoint)]
        scale: Rows | float | None = None
        if scales:
            scale = Rows(scales) if scales[0].size > 1 else float(scales[0].reshape(()))
        rows = Rows([checkpoint.read(name) for name in names], scale)
        if rows.shape != table.shape:
            raise CheckpointError(
                f"{checkpoint.path}: table {names[0]!r} ({len(names)} tensors) is "
                f"{list(rows.shape)}; the config asks for {list(table.shape)}"
            )
        opened[key] = rows
    return opened


def random_tables(declared: Declared, seed: int = 0) -> Tables:
    """Made-up tables for a model with random weights; optional ones are absent."""
    rng = np.random.default_rng(seed)
    opened: Tables = {}
    for key, table in declared.items():
        if isinstance(table, Derived):
            opened[key] = table.build(None)
        elif not table.optional:
            if math.prod(table.shape) > RANDOM_LIMIT:
                raise ValueError(f"table {key} of {list(table.shape)} is too large to make up")
            opened[key] = Rows([rng.standard_normal(table.shape, np.float32)])
    return opened


def gather(
    family: Any,
    config: Any,
    tables: Tables,
    rows: Sequence[tuple[np.ndarray, int, int]],
    width: int,
) -> dict[str, np.ndarray] | None:
    """What `batch.prelude` holds for a batch of B rows padded to `width` tokens: [B, width, ...]
    by name, zeros behind each row's real tokens; None for a family without tables.

    Args:
      rows: for each row all token ids of its sequence so far, `start` and how many are new.
    """
    if not hasattr(family, "prelude"):
        return None
    shapes = family.prelude_shapes(config)
    if not shapes:
        return None
    found = {n: np.zeros((len(rows), width, *s), np.float32) for n, s in shapes.items()}
    for at, (tokens, start, count) in enumerate(rows):
        if count:
            for name, value in family.prelude(config, tables, tokens, start, count).items():
                found[name][at, :count] = value
    return found


def _spelling(patterns: Sequence[str], checkpoint: Any) -> list[str]:
    """The tensors of the first spelling that the checkpoint has."""
    for pattern in patterns:
        if "{shard}" not in pattern:
            if pattern in checkpoint.names:
                return [pattern]
            continue
        shards: list[str] = []
        while (name := pattern.format(shard=len(shards))) in checkpoint.names:
            shards.append(name)
        if shards:
            return shards
    return []
