"""Sparse grouped-query layers of real models, for benchmarks and compilation tests."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """Heads, their channels, and the keys chosen for a query."""

    heads: int
    kv_heads: int
    dim: int
    chosen: int


SHAPES = {"Qwen3.8-Flash-Next": Shape(24, 2, 256, 2051)}
