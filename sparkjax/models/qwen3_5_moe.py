"""qwen3_5_moe: qwen3_5 with routed experts and a gated shared one (Qwen3.5-122B-A10B)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config import ConfigReader, text_section
from .layers.gated_moe import read_gated_experts
from .qwen3_5 import (
    IGNORED,
    Config,
    declare,
    declare_caches,
    declare_draft,
    declare_draft_caches,
    draft,
    final,
    forward,
    logits,
    read_common,
)

__all__ = [
    "IGNORED",
    "Config",
    "declare",
    "declare_caches",
    "declare_draft",
    "declare_draft_caches",
    "draft",
    "final",
    "forward",
    "logits",
    "read_config",
]


def read_config(values: Mapping[str, Any]) -> Config:
    r = ConfigReader(text_section(values))
    # Its weights always sum to 1, whatever the config says.
    r.require("norm_topk_prob", (True,), True)
    return Config(**read_common(r, values), width=0, experts=read_gated_experts(r))
