"""Latent attention layers of real models, for benchmarks and compilation tests."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """Heads, channels of a row and of its value, rows chosen for a query, and the window that
    all queries see beside them."""

    heads: int
    dim: int
    value_dim: int
    chosen: int
    window: int = 0
    sinks: bool = False


SHAPES = {
    "GLM-5.3": Shape(64, 576, 512, 2048),
    "GLM-5.3-Flash": Shape(64, 512, 512, 2051),
    "DeepSeek-V4-Flash": Shape(64, 512, 512, 512, window=128, sinks=True),
}
