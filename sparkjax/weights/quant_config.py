"""What a checkpoint's config says about quantization, for choosing between readings that look alike.

Nothing here decides that a tensor is quantized: names, dtypes and shapes do (see `detect`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

FUSED_SHARDS = 4
"""Slices of the rows of fused projections where a checkpoint that has such does not tell."""
AUTOROUND = ("auto-round", "intel/auto-round", "auto_round")


class QuantConfig:
    """The quantization section of a config.json (or of an hf_quant_config.json)."""

    def __init__(self, config: Mapping[str, Any]):
        self.values = _section(config)
        self.method = str(self.values.get("quant_method", "")).lower()
        self.rules = list(self._rules())
        fused = config.get("model_type") == "mimo_v2"
        fused |= config.get("attention_projection_layout") == "fused_qkv"
        self._fused_shards = config.get("checkpoint_shards", FUSED_SHARDS if fused else 1)

    def _rules(self) -> Iterator[tuple[re.Pattern[str], dict[str, Any]]]:
        """Patterns of module names with their own settings, first match wins (GPTQ `dynamic`,
        AutoRound `extra_config`)."""
        for name, value in _mapping(self.values.get("dynamic")).items():
            yield _pattern(name.removeprefix("+:").removeprefix("-:")), _mapping(value)
        for name, value in _mapping(self.values.get("extra_config")).items():
            yield _pattern(name), _mapping(value)

    def get(self, module: str, key: str) -> Any:
        """A setting of GPTQ, AWQ or AutoRound as it holds for a module."""
        for pattern, value in self.rules:
            if key in value and pattern.match(module):
                return value[key]
        return self.values.get(key)

    def schemes(self) -> list[dict[str, Any]]:
        """The weight schemes of compressed-tensors' `config_groups`."""
        groups = _mapping(self.values.get("config_groups")).values()
        return [_mapping(_mapping(group).get("weights")) for group in groups]

    def groups(self, module: str) -> list[int]:
        """Group sizes that this module may have."""
        found = [self.get(module, "group_size"), *(s.get("group_size") for s in self.schemes())]
        return [g for g in found if type(g) is int and g > 0]

    def widths(self, module: str) -> list[int]:
        """Bits a weight that this module may have."""
        found = [self.get(module, "bits"), *(s.get("num_bits") for s in self.schemes())]
        return [b for b in found if type(b) is int and b > 0]

    def blocks(self) -> list[tuple[int, int]]:
        """Block shapes of FP8 weights."""
        found = [self.values.get("weight_block_size")]
        found += [s.get("block_structure") for s in self.schemes()]
        return [
            (b[0], b[1])
            for b in found
            if isinstance(b, (list, tuple)) and len(b) == 2 and all(type(n) is int and n > 0 for n in b)
        ]

    def shards(self, module: str) -> int:
        """How many slices of this module's rows have FP8 blocks of their own."""
        return self._fused_shards if module.endswith("qkv_proj") else 1

    def refusal(self, family: str) -> str | None:
        """Why quantized weights of this family of formats cannot be read, whatever the tensors.

        Args:
          family: "gptq", "awq" or anything else.
        """
        for key in ("transform_config", "rotation_config"):
            if self.values.get(key):
                return f"{key} asks for activations to be rotated, which is not supported"
        sparsity = _mapping(self.values.get("sparsity_config")).get("format", "dense")
        if sparsity not in ("dense", None):
            return f"sparsity_config.format is {sparsity!r}; allowed: 'dense'"
        layout = self.layout
        if family == "gptq" and layout not in ("gptq", "gptq_v2", "gptq_p"):
            return f"the GPTQ format is {layout!r}; allowed: gptq, gptq_v2, gptq_p"
        if family == "gptq" and self.values.get("pack_dtype", "int32") != "int32":
            return f"pack_dtype is {self.values['pack_dtype']!r}; allowed: 'int32'"
        version = str(self.values.get("version", "gemm")).lower()
        if family == "awq" and self.method == "awq" and version != "gemm":
            return f"the AWQ version is {version!r}; allowed: 'gemm'"
        return None

    @property
    def layout(self) -> str:
        """GPTQ's format; AutoRound's files are one of them under another name."""
        if self.method != "gptq":
            return "gptq"
        return str(
            self.values.get("checkpoint_format") or self.values.get("format") or "gptq"
        ).lower()


def _section(config: Mapping[str, Any]) -> dict[str, Any]:
    for holder in (config, _mapping(config.get("text_config"))):
        for key in ("quantization_config", "compression_config", "quantization"):
            if _mapping(holder.get(key)):
                return _mapping(holder[key])
    return {}


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error:
        return re.compile(re.escape(text))
