"""DeepSeek-V4.1: other shapes and schedules than the golden's, against a plain reference."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference_v41 import Reference

from sparkjax.mesh.context import Context
from sparkjax.model import Model
from sparkjax.models import cache as caches
from sparkjax.models import deepseek_v41, tables
from sparkjax.models.config import UnsupportedConfig
from sparkjax.models.layers.engram import engram_rows, token_classes
from sparkjax.models.params import Param, map_params
from sparkjax.text.tokenizer import Tokenizer
from sparkjax.weights.errors import CheckpointError
from sparkjax.weights.safetensors import SafetensorsFile

GOLDEN = Path(__file__).parents[1] / "golden/deepseek_v41"

VARIANTS: dict[str, dict[str, Any]] = {
    # Scanned readers and indexers, several owners of one ratio, a memory in the middle.
    "deep": {
        "num_hidden_layers": 18,
        "compress_ratios": [0, 0, *[2] * 8, *[1] * 8, 0, 0, 0],
        "kv_source_layer_ids": [2, 6, 10],
        "index_source_layer_ids": [2, 6, 10, 12, 14, 16],
        "candidate_source_layer_id": 10,
        "engram_layer_ids": [1, 8],
        "sliding_window": 5,
        "num_attention_heads": 6,
        "o_groups": 3,
    },
    # Wide entries of two ratios, no candidates, no memories, another number of streams.
    "plain": {
        "num_hidden_layers": 7,
        "compress_ratios": [3, 3, 0, 5, 5, 5, 5],
        "kv_source_layer_ids": [0, 3],
        "index_source_layer_ids": [0, 3, 5],
        "candidate_source_layer_id": None,
        "engram_layer_ids": [],
        "sliding_window": 2,
        "index_topk": 3,
        "hc_mult": 3,
        "hc_sinkhorn_iters": 4,
        "n_routed_experts": 5,
        "num_experts_per_tok": 3,
        "swiglu_limit": 0.7,
        "rope_scaling": None,
        "tie_word_embeddings": True,
    },
    # Blocks hold fewer entries than are chosen; the picker does not own its entries.
    "narrow": {
        "num_hidden_layers": 6,
        "compress_ratios": [0, 2, 2, 2, 2, 2],
        "kv_source_layer_ids": [1],
        "index_source_layer_ids": [1, 3, 4],
        "candidate_source_layer_id": 3,
        "candidate_topk_blocks": 2,
        "candidate_block_size": 3,
        "index_topk": 9,
        "engram_layer_ids": [3],
        "engram_max_ngram_size": 3,
        "engram_n_heads": 3,
        "qk_rope_head_dim": 12,
    },
}


SEEDS = {"deep": 2, "plain": 1, "narrow": 1}
"""Of prompts whose selections are all clear."""


def settings(name: str) -> dict[str, Any]:
    values = json.loads((GOLDEN / "config.json").read_text())
    text = values.pop("text_config")
    values |= text | VARIANTS[name]
    del values["engram_num_embeddings"]
    return values


def shaken(name: str, **changes: Any) -> Model:
    """A model whose norms, biases, sinks and scales are random too."""
    config = deepseek_v41.read_config(settings(name) | changes)
    rng = np.random.default_rng(3)

    def draw(param: Param) -> jax.Array:
        std = param.dims[-1].size ** -0.5 if param.init == "normal" else 0.3
        drawn = rng.normal(size=param.shape, scale=std, loc=param.init == "ones")
        return jnp.asarray(drawn, jnp.float32)

    params = map_params(draw, deepseek_v41.declare(config, 1))
    hosted = tables.random_tables(deepseek_v41.declare_tables(config), 3)
    return Model(deepseek_v41, config, params, Context("float32"), tables=hosted)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "plain" else pytest.mark.slow) for name in VARIANTS]
)
def test_equals_the_plain_reference(name: str):
    model = shaken(name)
    tokens = np.random.default_rng(SEEDS[name]).integers(3, model.config.vocab, 61)
    reference = Reference(model)
    expected = reference.logits(tokens)
    assert reference.gap > 5e-6, "a selection is too close to call in float32"
    for tile in (None, 11):
        found = model.forward(tokens, tile=tile).logits
        np.testing.assert_allclose(found, expected, atol=2e-4)


@pytest.mark.slow
def test_gradients_equal_differences():
    """Where all experts and entries take part, so that nothing jumps."""
    model = shaken("narrow", index_topk=99, candidate_topk_blocks=99, num_experts_per_tok=6)
    tokens = np.random.default_rng(1).integers(3, model.config.vocab, 30)
    batch = model._row(tokens, 0, 30, 1, pad=30)

    @jax.jit
    def objective(params: Any) -> jax.Array:
        cache = caches.allocate(
            deepseek_v41.declare_caches(model.config, 1), caches.Sizes(1, 64, 1), "float32"
        )
        out = deepseek_v41.forward(params, cache, batch, model.config, model.context)
        logits = deepseek_v41.logits(params, out.residual, model.config, model.context)[0, :-1]
        return jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(29), tokens[1:]])

    gradient = jax.jit(jax.grad(objective))(model.params)
    size = jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(gradient)))

    def moved(step: float) -> Any:
        return jax.tree.map(lambda w, g: w + step / size * g, model.params, gradient)

    slope = (objective(moved(2e-3)) - objective(moved(-2e-3))) / 4e-3
    np.testing.assert_allclose(slope, size, rtol=0.02)


# --- Engram -------------------------------------------------------------------------------------


def test_token_classes_and_rows_are_the_golden_ones():
    config = deepseek_v41.read_config(json.loads((GOLDEN / "config.json").read_text()))
    golden = SafetensorsFile(GOLDEN / "golden.safetensors")
    classes = token_classes(Tokenizer.from_dir(GOLDEN), config.engram)
    assert (classes == golden.read("prompt_0.engram.token_map")).all()
    tokens = golden.read("prompt_0.input_ids")
    facts = json.loads((GOLDEN / "golden.json").read_text())["engram"]
    for which, layer in enumerate(config.engram.layers):
        expected = golden.read(f"prompt_0.engram.rows.layer_{layer:02d}")
        assert config.engram.primes(which).tolist() == facts["primes"][which]
        assert config.engram.multipliers(which).tolist() == facts["multipliers"][which]
        for start, count in ((0, len(tokens)), (1, 1), (2, 5), (50, 3)):
            rows = engram_rows(config.engram, which, classes, tokens, start, count)
            assert (rows == expected[start : start + count]).all()


def test_multipliers_of_the_release():
    values = settings("deep") | {
        "engram_compressed_vocab_size": 99092,
        "engram_layer_ids": [1, 14],
        "engram_vocab_size": 16000000,
        "engram_n_heads": 8,
    }
    engram = deepseek_v41.read_config(values).engram
    assert engram.multipliers(0).tolist() == [
        76632096046245, 4839876093313, 35959672319349, 73987337458391
    ]  # fmt: skip
    assert engram.multipliers(1).tolist() == [
        67716810739261, 51510806800915, 30921347202721, 82619226485591
    ]  # fmt: skip
    assert engram.columns == 24


def test_a_tokenizer_with_another_number_of_classes_is_refused():
    values = settings("deep") | {"engram_compressed_vocab_size": 256}
    engram = deepseek_v41.read_config(values).engram
    with pytest.raises(CheckpointError, match=r"257 classes.*engram_compressed_vocab_size is 256"):
        token_classes(Tokenizer.from_dir(GOLDEN), engram)


def test_a_batch_without_rows_is_refused():
    model = shaken("narrow")
    model.tables = {}
    model.prelude = lambda rows, width: None
    with pytest.raises(ValueError, match="engram_0"):
        model.forward(np.arange(5))
    assert set(tables.declared(model.family, model.config)) == {"engram_classes", "engram_0"}


# --- Refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kv_source_layer_ids", [3, 2]),
        ("kv_source_layer_ids", [1, 2]),
        ("index_source_layer_ids", [2, 6]),
        ("compress_ratios", [0, 0, 2]),
        ("compress_ratios", [2, 0, 2, 2, 1, 1, 1, 1]),
        ("candidate_source_layer_id", 3),
        ("candidate_topk_blocks", 0),
        ("engram_num_embeddings", [303, 462]),
        ("engram_layer_ids", [5, 1]),
        ("num_nextn_predict_layers", 1),
        ("num_key_value_heads", 2),
        ("o_groups", 3),
        ("scoring_func", "sigmoid"),
        ("hidden_act", "gelu"),
    ],
)
def test_refuses_by_name(field: str, value: Any):
    values = json.loads((GOLDEN / "config.json").read_text())
    values["text_config"][field] = value
    with pytest.raises(UnsupportedConfig, match=field):
        deepseek_v41.read_config(values)
