"""Hyper-connections of real models, for benchmarks and compilation tests."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Shape:
    """Streams and their channels, the dtype of `fn`, and rounds of the normalisation."""

    streams: int
    hidden: int
    dtype: Any
    rounds: int = 20


SHAPES = {
    "GLM-5.3-Flash": Shape(4, 4096, jnp.bfloat16),
    "DeepSeek-V4.1-Flash": Shape(4, 5120, jnp.float32),
}
