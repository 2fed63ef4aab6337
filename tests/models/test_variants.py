"""Variants that no golden shows: group routing, extended ropes, biases, tied heads, odd shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from variants import VARIANTS, make

from sparkjax.models.config import UnsupportedConfig
from sparkjax.models.registry import family_of
from sparkjax.verify import verify

STORED = Path(__file__).parent / "variants"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "flint_steps" else ())
        for name in sorted(path.name for path in STORED.iterdir())
    ],
)
def test_stored_variants_equal_transformers(name: str):
    assert not [line for line in verify(STORED / name).lines if line.ok is False]


@pytest.mark.slow
@pytest.mark.parametrize("tile", [1, 7, 16])
@pytest.mark.parametrize("name", sorted(path.name for path in STORED.iterdir()))
def test_stored_variants_equal_transformers_in_tiles(name: str, tile: int):
    assert not [line for line in verify(STORED / name, tiles=tile).lines if line.ok is False]


@pytest.mark.parity
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_variants_equal_transformers(name: str, seed: int, tmp_path: Path):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    make(name, tmp_path, seed)
    # A random model's greedy margins may be smaller than rounding: the logits decide.
    lines = [line for line in verify(tmp_path).lines if line.relative is not None]
    assert not [line for line in lines if not line.ok]


GLM = {
    "model_type": "glm4_moe", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "moe_intermediate_size": 8, "n_routed_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
FLINT = {
    "model_type": "flint", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 4,
    "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "num_experts": 8,
    "num_experts_per_tok": 2,
}  # fmt: skip
MIMO = {**GLM, "model_type": "mimo_v2_flash", "head_dim": 12, "v_head_dim": 8}
FUSED = {**MIMO, "model_type": "mimo_v2"}


@pytest.mark.parametrize(
    ("base", "field", "value"),
    [
        (GLM, "hidden_act", "gelu"),
        (GLM, "scoring_func", "softmax"),
        (GLM, "n_group", 3),
        (GLM, "num_experts_per_tok", 9),
        (GLM, "rope_parameters", {"rope_type": "longrope", "factor": 2.0}),
        (FLINT, "layer_types", ["linear_attention"] * 3),
        (FLINT, "num_experts_per_tok", 9),
        (MIMO, "n_shared_experts", 1),
        (MIMO, "moe_layer_freq", [0, 2]),
        (MIMO, "layer_types", ["full_attention"]),
        (MIMO, "rope_scaling", {"type": "yarn", "factor": 2.0}),
        (FUSED, "checkpoint_shards", 4),
        (FUSED, "attention_projection_layout", "fused_kv"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(base: dict[str, Any], field: str, value: Any):
    family = family_of(base)
    family.read_config({**base, "checkpoint_shards": 2})
    with pytest.raises(UnsupportedConfig, match=field if field != "rope_parameters" else "rope_type"):
        family.read_config({**base, "checkpoint_shards": 2, field: value})


def test_mimo_reads_releases_and_transformers_alike():
    family = family_of(MIMO)
    release = {
        "hybrid_layer_pattern": [0, 1], "moe_layer_freq": [0, 1], "layernorm_epsilon": 1e-5,
        "rope_theta": 5e6, "swa_rope_theta": 1e4, "partial_rotary_factor": 0.334,
        "sliding_window_size": 6, "sliding_window": 6, "routed_scaling_factor": None,
        "swa_num_key_value_heads": 4, "add_swa_attention_sink_bias": True,
    }  # fmt: skip
    rope = {"rope_type": "default", "partial_rotary_factor": 0.334}
    written = {
        "layer_types": ["full_attention", "sliding_attention"], "mlp_layer_types": ["dense", "sparse"],
        "rms_norm_eps": 1e-5, "sliding_window": 7, "routed_scaling_factor": 1.0,
        "rope_parameters": {
            "full_attention": {**rope, "rope_theta": 5e6},
            "sliding_attention": {**rope, "rope_theta": 1e4},
        },
    }  # fmt: skip
    assert family.read_config({**MIMO, **release}) == family.read_config({**MIMO, **written})
