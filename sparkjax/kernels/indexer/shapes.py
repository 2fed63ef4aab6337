"""Indexers of real models, for benchmarks and compilation tests."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """Heads, their channels, rows that are chosen, and tokens a row."""

    heads: int
    dim: int
    chosen: int
    stride: int = 1


SHAPES = {
    "GLM-5.3": Shape(32, 128, 2048),
    "GLM-5.3-Flash": Shape(32, 128, 512, stride=4),
    "DeepSeek-V4-Flash": Shape(64, 128, 512, stride=4),
    "Qwen3.8-Flash-Next": Shape(4, 128, 512, stride=4),
}
