"""Vocabularies of real models, for benchmarks and compilation tests."""

from __future__ import annotations

SHAPES = {
    "SmolLM2": 49_152,
    "DeepSeek-V4-Flash": 129_280,
    "Qwen3-8B": 151_936,
    "GLM-5.3-Flash": 154_880,
    "Qwen3.8-27B": 248_320,
}
