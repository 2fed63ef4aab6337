"""Kimi delta attention layers of real models, for benchmarks and compilation tests."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """Heads and the channels of their keys and values."""

    heads: int
    dim: int = 128


SHAPES = {"GLM-5.3-Flash": Shape(64)}
