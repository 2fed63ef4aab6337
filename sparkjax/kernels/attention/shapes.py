"""Attention layers of real models, for benchmarks and compilation tests."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """Heads of one kind of layer; `window` 0 is full attention over pages, else over a ring."""

    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    window: int = 0
    sinks: bool = False


SHAPES = {
    "SmolLM2-135M": Shape(9, 3, 64, 64),
    "Qwen3-0.6B": Shape(16, 8, 128, 128),
    "gemma-3-270m, full": Shape(4, 1, 256, 256),
    "gemma-3-270m, sliding": Shape(4, 1, 256, 256, window=512),
    "GLM-4.7": Shape(96, 8, 128, 128),
    "Qwen3.8-27B": Shape(24, 4, 256, 256),
    "Qwen3.5-122B-A10B": Shape(32, 2, 256, 256),
    "MiMo-V2-Flash, full": Shape(64, 4, 192, 128),
    "MiMo-V2-Flash, sliding": Shape(64, 8, 192, 128, window=129, sinks=True),
    "Flint, full": Shape(32, 4, 128, 128, sinks=True),
    "Flint, sliding": Shape(32, 4, 128, 128, window=513, sinks=True),
}
