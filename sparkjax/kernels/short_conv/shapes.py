"""Short convolutions of real models, for benchmarks and compilation tests."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """Channels, taps and the tokens between them."""

    channels: int
    width: int = 4
    dilation: int = 1


SHAPES = {
    "GLM-5.3-Flash": Shape(3 * 64 * 128),
    "Qwen3.8-27B": Shape(2 * 16 * 128 + 48 * 128),
    "Qwen3.8-Flash-Next, n-grams": Shape(4 * 2560, dilation=3),
}
