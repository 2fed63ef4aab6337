"""Expert layers of real models, as one rank has them, for benchmarks and compilation tests."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """Experts, those of a token, channels of x and of an expert.

    Attributes:
      whole: channels of the whole blocks of 128 that an expert's lie in, where a format does not cut
        them; 0 where they are whole blocks.
    """

    experts: int
    chosen: int
    hidden: int
    width: int
    whole: int = 0


SHAPES = {
    "GLM-5.3-Flash": Shape(288, 8, 4096, 2048),
    "GLM-5.3, one of 3": Shape(256, 8, 6144, 683, 768),
    "DeepSeek-V4.1-Flash, one of 4": Shape(384, 6, 5120, 576, 640),
}
