"""Two-level indexers of real models, for benchmarks and compilation tests."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """Heads, their channels, rows that are chosen, and how many blocks of how many rows are picked."""

    heads: int
    dim: int
    chosen: int
    blocks: int
    size: int


SHAPES = {"DeepSeek-V4.1-Flash": Shape(32, 128, 512, 2048, 8)}
