"""qwen3: llama with an RMS norm on every query and key head before rope (Qwen team 2025)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from . import llama
from .config import ConfigReader, text_section
from .llama import ROW_INVARIANT, Config, declare, declare_caches, final, forward, logits

__all__ = ["ROW_INVARIANT", "Config", "declare", "declare_caches", "final", "forward", "logits", "read_config"]


def read_config(values: Mapping[str, Any]) -> Config:
    r = ConfigReader(text_section(values))
    r.require("use_sliding_window", (False,), False)
    # Qwen3 puts no bias on the output projection.
    return dataclasses.replace(
        llama.read_config({"head_dim": 128, **values}), head_norms=True, output_bias=False
    )
