"""GGUF models in Hugging Face terms: names, configuration, and what a converter changed."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from sparkjax.weights.checkpoint import open_checkpoint
from sparkjax.weights.errors import CheckpointError
from sparkjax.weights.gguf import GGUFFile
from sparkjax.weights.gguf_models import Add, PermuteRows, describe, read_source

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FFN, LAYERS, VOCAB = 4, 2, 16, 64, 96, 2, 32


def hf_shapes(arch: str) -> dict[str, tuple[int, ...]]:
    """Shapes of a tiny model under Hugging Face names."""
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    block = {
        "self_attn.q_proj": (q, HIDDEN),
        "self_attn.k_proj": (kv, HIDDEN),
        "self_attn.v_proj": (kv, HIDDEN),
        "self_attn.o_proj": (HIDDEN, q),
        "mlp.gate_proj": (FFN, HIDDEN),
        "mlp.up_proj": (FFN, HIDDEN),
        "mlp.down_proj": (HIDDEN, FFN),
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }
    if arch != "llama":
        block |= {"self_attn.q_norm": (HEAD_DIM,), "self_attn.k_norm": (HEAD_DIM,)}
    if arch == "gemma3":
        block |= {
            "pre_feedforward_layernorm": (HIDDEN,),
            "post_feedforward_layernorm": (HIDDEN,),
        }
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for i in range(LAYERS):
        shapes |= {f"model.layers.{i}.{name}.weight": s for name, s in block.items()}
    return shapes


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's LlamaModel.permute."""
    n, *rest = weight.shape
    return weight.reshape(heads, 2, n // heads // 2, *rest).swapaxes(1, 2).reshape(weight.shape)


def convert(path: Path, arch: str, weights: dict[str, np.ndarray], drop=(), **extra) -> GGUFFile:
    """Writes a file as llama.cpp's converter would, with the `gguf` library's own name table."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(50000.0)
    writer.add_eos_token_id(2)
    if arch != "llama":
        writer.add_key_length(HEAD_DIM)
        writer.add_value_length(HEAD_DIM)
    if arch == "gemma3":
        writer.add_sliding_window(12)
    for key, value in extra.items():
        key = f"{arch}.{key.replace('__', '.')}"
        {float: writer.add_float32, int: writer.add_uint32, str: writer.add_string}[type(value)](
            key, value
        )
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, arch.upper()), LAYERS)
    for name, value in weights.items():
        if name in drop:
            continue
        if arch == "llama" and "q_proj" in name:
            value = permuted(value, HEADS)
        if arch == "llama" and "k_proj" in name:
            value = permuted(value, KV_HEADS)
        if arch == "gemma3" and name.endswith("norm.weight"):
            value = value + 1
        writer.add_tensor(names.get_name(name, (".weight", ".bias")) or name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFFile.open(path)


def random_weights(arch: str, **more: tuple[int, ...]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = hf_shapes(arch) | {k.replace("__", "."): v for k, v in more.items()}
    # Multiples of 1/64 survive the converter's +1 exactly.
    return {n: (rng.integers(-64, 64, s) / 64).astype(np.float32) for n, s in shapes.items()}


@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma3"])
def test_round_trip_through_the_converters_rules(tmp_path, arch):
    weights = random_weights(arch)
    opened = convert(tmp_path / "m.gguf", arch, weights)
    config, sources = describe(opened)
    assert set(sources) == set(weights)
    for name, expected in weights.items():
        got = read_source(opened, sources[name])
        np.testing.assert_array_equal(got, expected, err_msg=name)
        part = slice(expected.shape[0] // 4, expected.shape[0] // 2)
        np.testing.assert_array_equal(read_source(opened, sources[name], part), expected[part])
    kinds = {type(s.transform) for s in sources.values()}
    assert kinds == {"llama": {type(None), PermuteRows}, "gemma3": {type(None), Add}}.get(
        arch, {type(None)}
    )
    expected = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "rope_scaling": None,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        "model_type": {"gemma3": "gemma3_text"}.get(arch, arch),
    }
    assert {k: config[k] for k in expected} == expected


def test_gemma3_says_what_llama_cpp_knows(tmp_path):
    opened = convert(tmp_path / "m.gguf", "gemma3", random_weights("gemma3"))
    config, _ = describe(opened)
    assert config["sliding_window"] == 12
    assert config["rope_local_base_freq"] == 10000.0
    assert config["query_pre_attn_scalar"] == HEAD_DIM
    # The embedding's factor is not rounded to bfloat16, as it is for published checkpoints.
    assert config["dtype"] == "float32"
    assert config["layer_types"] == ["sliding_attention"] * LAYERS
    opened = convert(
        tmp_path / "n.gguf",
        "gemma3",
        random_weights("gemma3"),
        attention__sliding_window_pattern=2,
        rope__scaling__type="linear",
        rope__scaling__factor=8.0,
    )
    config, _ = describe(opened)
    assert config["layer_types"] == ["sliding_attention", "full_attention"]
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}


def test_permuted_rows_are_exact_on_quantized_bytes(tmp_path):
    weights = random_weights("llama")
    opened = convert(tmp_path / "m.gguf", "llama", weights)
    _, sources = describe(opened)
    name = "model.layers.0.self_attn.k_proj.weight"
    quantize = gguf.quants.quantize
    stored = quantize(opened.read(sources[name].name), gguf.GGMLQuantizationType.Q8_0)
    expected = quantize(weights[name], gguf.GGMLQuantizationType.Q8_0)
    np.testing.assert_array_equal(sources[name].transform(stored), expected)
    assert not np.array_equal(stored, expected)


def test_biases_and_an_untied_head(tmp_path):
    weights = random_weights("llama", lm_head__weight=(VOCAB, HIDDEN))
    biases = {
        "model.layers.0.self_attn.q_proj.bias": np.arange(64, dtype=np.float32),
        "model.layers.0.mlp.up_proj.bias": np.arange(FFN, dtype=np.float32),
    }
    opened = convert(tmp_path / "m.gguf", "llama", weights | biases)
    config, sources = describe(opened)
    assert not config["tie_word_embeddings"] and config["attention_bias"] and config["mlp_bias"]
    for name, value in biases.items():
        np.testing.assert_array_equal(read_source(opened, sources[name]), value)
    assert "lm_head.weight" in sources


def llama3_table(factor: float, theta: float, head_dim: int) -> np.ndarray:
    """As in llama.cpp's LlamaModel.generate_extra_tensors."""
    out = []
    for freq in 1.0 / theta ** (np.arange(0, head_dim, 2) / head_dim):
        wavelength = 2 * np.pi / freq
        if wavelength < 8192 / 4:
            out.append(1.0)
        elif wavelength > 8192 / 1:
            out.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, np.float32)


def test_llama3_scaling_is_recognised_or_refused(tmp_path):
    table = llama3_table(32.0, 50000.0, HEAD_DIM)
    weights = random_weights("llama") | {"rope_freqs.weight": table}
    config, sources = describe(convert(tmp_path / "m.gguf", "llama", weights))
    assert config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert "rope_freqs.weight" not in {s.name for s in sources.values()}
    weights["rope_freqs.weight"] = np.linspace(1, 32, HEAD_DIM // 2, dtype=np.float32)
    with pytest.raises(CheckpointError, match=r"rope_freqs.weight"):
        describe(convert(tmp_path / "n.gguf", "llama", weights))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"expert_count": 8}, "llama.expert_count is 8"),
        ({"attention__value_length": 8}, "value_length is 8"),
        ({"rope__scaling__type": "longrope"}, "longrope.*none, linear, yarn"),
        ({"rope__dimension_count": 8}, "dimension_count is 8"),
        ({"attention__head_count_kv": "2"}, "head_count_kv"),
    ],
)
def test_unknown_metadata_is_refused_by_name(tmp_path, extra, message):
    opened = convert(tmp_path / "m.gguf", "llama", random_weights("llama"))
    changes = {f"llama.{k.replace('__', '.')}": v for k, v in extra.items()}
    opened.metadata.update(changes)
    with pytest.raises(CheckpointError, match=f"m.gguf.*{message}"):
        describe(opened)


def test_missing_unknown_and_misshapen_tensors(tmp_path):
    weights = random_weights("llama")
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(CheckpointError, match=r"blk.1.ffn_up.weight.*missing"):
        describe(convert(tmp_path / "a.gguf", "llama", weights, drop=[name]))
    with pytest.raises(CheckpointError, match=r"not part of a llama model: blk.9.x"):
        describe(convert(tmp_path / "b.gguf", "llama", weights | {"blk.9.x": weights[name]}))
    weights["model.layers.0.self_attn.k_proj.weight"] = np.zeros((64, HIDDEN), np.float32)
    with pytest.raises(CheckpointError, match=r"blk.0.attn_k.weight.*64 rows.*32"):
        describe(convert(tmp_path / "c.gguf", "llama", weights))
    with pytest.raises(CheckpointError, match=r"general.architecture is 'mamba'.*llama, qwen3"):
        opened = convert(tmp_path / "d.gguf", "llama", random_weights("llama"))
        opened.metadata["general.architecture"] = "mamba"
        describe(opened)


def test_a_type_without_a_decoder_is_named(tmp_path):
    weights = random_weights("llama")
    name = "model.layers.0.mlp.up_proj.weight"
    convert(tmp_path / "a.gguf", "llama", weights | {name: weights[name].astype(np.int8)})
    checkpoint = open_checkpoint(tmp_path / "a.gguf")
    with pytest.raises(CheckpointError, match=r"a.gguf: tensor 'blk.0.ffn_up.weight'.*I8.*allowed: Q4_0"):
        checkpoint.weight(name)
