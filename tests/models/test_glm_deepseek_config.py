"""Configs of the sparse families: schedules, old spellings, refusals by field name."""

import copy
import json

import pytest
from driver import GOLDEN

from sparkjax.models import deepseek_v4, glm5_next, glm_moe_dsa, params
from sparkjax.models.config import UnsupportedConfig

MODULES = {"glm_moe_dsa": glm_moe_dsa, "glm5_next": glm5_next, "deepseek_v4": deepseek_v4}


def values(family, drop=(), **changes):
    found = json.loads((GOLDEN / family / "config.json").read_text())
    text = found.get("text_config", found)
    for name in drop:
        text.pop(name, None)
    text.update(changes)
    return found


def read(family, drop=(), **changes):
    return MODULES[family].read_config(values(family, drop, **changes))


def test_the_published_indexer_schedule():
    config = read(
        "glm_moe_dsa",
        ("indexer_types", "layer_types", "mlp_layer_types"),
        num_hidden_layers=78,
        index_topk_freq=4,
        index_skip_topk_offset=3,
        first_k_dense_replace=3,
    )
    assert config.of("full") == (0, 1, 2, *range(6, 75, 4))
    assert config.of("dense") == (0, 1, 2)
    pattern = read("glm_moe_dsa", ("indexer_types",), index_topk_pattern="FFSSF")
    assert pattern.indexers == ("full", "full", "shared", "shared", "full")


def test_yarn_scales_the_softmax_too():
    plain = read("glm_moe_dsa")
    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    scaled = read("glm_moe_dsa", rope_parameters=yarn | {"original_max_position_embeddings": 64})
    assert scaled.latent.scale == pytest.approx(plain.latent.scale * (0.1 * 1.3862943611 + 1) ** 2)
    assert scaled.rope.attention_factor == 1.0


def test_glm5_next_flat_nested_and_old():
    nested = values("glm5_next")
    flat = copy.deepcopy(nested["text_config"]) | {"model_type": "glm5_next"}
    assert glm5_next.read_config(flat) == glm5_next.read_config(nested)
    old = read(
        "glm5_next",
        ("linear_lower_bound", "layer_types"),
        layer_types=["linear_attention", "full_attention", "mamba", "linear_attention", "full_attention"],
        linear_attn_config={"head_dim": 24, "num_heads": 2, "short_conv_kernel_size": 3},
    )
    assert old.mixers == ("linear", "full", "linear", "linear", "full")
    assert (old.kimi.dim, old.kimi.heads, old.kimi.width, old.kimi.low) == (24, 2, 3, -5.0)
    assert read("glm5_next", linear_lower_bound=None).kimi.low is None
    assert read("glm5_next", ("index_kpool",), index_topk=32).index.pool == 16


def test_text_only_checkpoints_have_shorter_names():
    tree = glm5_next.declare(read("glm5_next"), 1)
    param = tree["layers"]["kda"]["q"]
    assert param.name.startswith("model.language_model.layers.")
    assert "model.layers.{layer}.self_attn.q_proj.weight" in param.also


def test_deepseek_v4_schedules():
    released = read(
        "deepseek_v4",
        ("layer_types", "compress_rates", "mlp_layer_types", "num_hash_layers"),
        num_hidden_layers=7,
        # The rest belongs to the drafter.
        compress_ratios=[0, 0, 4, 128, 4, 128, 4, 0, 0, 0],
    )
    assert released.mixers == ("window", "window", "csa", "hca", "csa", "hca", "csa")
    assert released.mlps == ("hash_moe",) * 3 + ("moe",) * 4
    assert (released.light.ratio, released.heavy.ratio) == (4, 128)
    rope = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536}
    flat = read("deepseek_v4", ("rope_parameters", "partial_rotary_factor"), rope_scaling=rope)
    assert flat.plain_rope.variant == "default" and flat.plain_rope.theta == 10000
    assert flat.entry_rope.variant == "yarn" and flat.entry_rope.theta == 160000
    assert flat.entry_rope.attention_factor == 1.0
    assert read("deepseek_v4", dspark_block_size=5).drafts == 0


@pytest.mark.parametrize(
    ("family", "field", "changes"),
    [
        ("glm_moe_dsa", "hidden_act", {"hidden_act": "gelu"}),
        ("glm_moe_dsa", "scoring_func", {"scoring_func": "softmax"}),
        ("glm_moe_dsa", "num_key_value_heads", {"num_key_value_heads": 2}),
        ("glm_moe_dsa", "indexer_types", {"indexer_types": ["shared"] + ["full"] * 4}),
        ("glm_moe_dsa", "layer_types", {"layer_types": ["linear_attention"] * 5}),
        ("glm_moe_dsa", "n_group", {"n_group": 3}),
        ("glm_moe_dsa", "rope_type", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}),
        ("glm_moe_dsa", "num_nextn_predict_layers", {"num_nextn_predict_layers": 2}),
        ("glm5_next", "qk_rope_head_dim", {"qk_rope_head_dim": 8}),
        ("glm5_next", "index_kpool_always_select_tail", {"index_kpool_always_select_tail": False}),
        ("glm5_next", "index_topk", {"index_topk": 30}),
        ("glm5_next", "indexer_types", {"indexer_types": ["full"] * 4 + ["shared"]}),
        ("glm5_next", "layer_types", {"layer_types": ["sliding_attention"] * 5}),
        ("deepseek_v4", "scoring_func", {"scoring_func": "sigmoid"}),
        ("deepseek_v4", "o_groups", {"o_groups": 3}),
        ("deepseek_v4", "num_key_value_heads", {"num_key_value_heads": 2}),
        ("deepseek_v4", "mlp_layer_types", {"mlp_layer_types": ["dense"] * 5}),
    ],
)
def test_refusals_name_the_field(family, field, changes):
    with pytest.raises(UnsupportedConfig, match=field):
        read(family, **changes)


@pytest.mark.parametrize("family", MODULES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_shares_of_all_ranks_are_equal(family, ranks):
    module, config = MODULES[family], read(family)
    for tree in (module.declare(config, ranks), module.declare_draft(config, ranks)):
        for path, param in params.leaves(tree):
            for dim in param.dims:
                assert dim.units is None or len(dim.units.source) % ranks == 0, path
