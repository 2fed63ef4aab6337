"""mimo_v2: mimo_v2_flash whose checkpoints join queries, keys and values in one tensor
(MiMo-V2.5, MiMo-V2.6-Flash)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import mimo_v2_flash
from .config import text_section
from .mimo_v2_flash import (
    DRAFTS,
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
)

__all__ = [
    "DRAFTS",
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
    layout = {"attention_projection_layout": "fused_qkv", **text_section(values)}
    return mimo_v2_flash.read_config(layout)
