"""Gated DeltaNet layers of real models, for benchmarks and compilation tests."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """Key and value heads, and their channels."""

    keys: int
    values: int
    dim: int = 128
    value_dim: int = 128


SHAPES = {
    "Qwen3.8-27B": Shape(16, 48),
    "Qwen3.5-122B-A10B": Shape(16, 64),
    "Qwen3.8-Flash-Next": Shape(16, 48),
}
