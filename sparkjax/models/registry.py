"""Which file implements which `model_type`."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from typing import Any

from .config import UnsupportedConfig

FAMILIES: dict[str, str] = {
    "llama": "llama",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
    "gemma3": "gemma3",
    "glm_moe_dsa": "glm_moe_dsa",
    "deepseek_v4": "deepseek_v4",
    "deepseek_v41": "deepseek_v41",
    "deepseek_v41_text": "deepseek_v41",
    "glm5_next": "glm5_next",
    "glm5_next_text": "glm5_next",
    "glm4_moe": "glm4_moe",
    "flint": "flint",
    "mimo_v2_flash": "mimo_v2_flash",
    "mimo_v2": "mimo_v2",
    "qwen3_5": "qwen3_5",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe": "qwen3_5_moe",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "qwen4_exp": "qwen4_exp",
    "qwen4_exp_text": "qwen4_exp",
}
"""model_type -> module of this package."""


def family_of(config: Mapping[str, Any]) -> Any:
    """The family module (see `family.Family`) of a config.json."""
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        near = difflib.get_close_matches(str(name), FAMILIES, 1)
        hint = f" (nearest: {near[0]})" if near else ""
        raise UnsupportedConfig(
            f"config.json: model_type is {name!r}{hint}; supported: {', '.join(sorted(FAMILIES))}"
        )
    return importlib.import_module(f".{FAMILIES[name]}", __package__)
