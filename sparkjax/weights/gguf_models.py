"""What a GGUF file says about its model, in the words of a Hugging Face checkpoint.

`describe` gives the configuration as the keys of `config.json`, and for every Hugging Face tensor
name the GGUF tensor that holds it, with what llama.cpp's converter did to it and must be undone.
Architectures: llama, qwen3, gemma3 (text). Sources: llama.cpp `convert_hf_to_gguf.py`,
`src/llama-model.cpp` and gguf-py's `tensor_mapping.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sparkjax.weights.errors import CheckpointError
from sparkjax.weights.gguf import GGUFFile


@dataclass(frozen=True, eq=False)
class PermuteRows:
    """Row r of the Hugging Face tensor is row `rows[r]` of the file: int64 [N].

    Rows of quantized tensors are independent, so the stored bytes can be permuted as they are.
    """

    rows: np.ndarray = field(repr=False)

    def __call__(self, values: np.ndarray) -> np.ndarray:
        """Reorders stored rows: the axis before the last, or the only one of a vector."""
        return values[self.rows] if values.ndim == 1 else values[..., self.rows, :]


@dataclass(frozen=True)
class Add:
    """The Hugging Face tensor is the file's plus `value`, computed in float32."""

    value: float

    def __call__(self, values: np.ndarray) -> np.ndarray:
        """Adds to a plain array; the result is float32."""
        return values.astype(np.float32) + np.float32(self.value)


@dataclass(frozen=True)
class GGUFSource:
    """Where a Hugging Face tensor comes from.

    Attributes:
      name: the tensor in the GGUF file.
      transform: None, or what to apply to the stored array: `PermuteRows` also works on the bytes
        of a quantized tensor, `Add` only occurs on plain ones.
    """

    name: str
    transform: PermuteRows | Add | None = None


def read_source(
    file: GGUFFile, source: GGUFSource, rows: slice | np.ndarray | None = None
) -> np.ndarray:
    """Stored values of a source with its transform applied: like `GGUFFile.read`.

    Args:
      rows: rows of the Hugging Face tensor (this host's shard); only those are read.
    """
    transform = source.transform
    if isinstance(transform, PermuteRows):
        return file.read(source.name, transform.rows if rows is None else transform.rows[rows])
    values = file.read(source.name, rows)
    return transform(values) if transform else values


def describe(file: GGUFFile) -> tuple[dict[str, Any], dict[str, GGUFSource]]:
    """The configuration and the tensors of a model, under their Hugging Face names.

    Returns:
      (config, sources): config has the keys of `config.json` (older spelling: `rope_theta`,
      `rope_scaling`); sources maps every Hugging Face tensor name to its place in the file.
      Without an `output.weight` the embedding is tied and there is no `lm_head.weight`.

    Raises:
      CheckpointError: an unknown architecture, a metadata key or tensor that this code would have
        to ignore, or one that is missing.
    """
    arch = file.metadata.get("general.architecture")
    if arch not in _ARCHITECTURES:
        raise CheckpointError(
            f"{file.path}: general.architecture is {arch!r}; allowed: {', '.join(_ARCHITECTURES)}"
        )
    fields = _Fields(file, arch)
    config = _common(fields) | _ARCHITECTURES[arch](fields)
    fields.refuse_the_rest()
    return config, _sources(file, arch, config)


class _Fields:
    """The `{arch}.*` metadata with typed access; remembers what was asked for."""

    # Keys that say nothing about the computation, or repeat what tensors say.
    _HARMLESS = frozenset({"vocab_size", "rope.dimension_count"})

    def __init__(self, file: GGUFFile, arch: str):
        self.file, self.arch, self.seen = file, arch, set(self._HARMLESS)

    def error(self, key: str, message: str) -> CheckpointError:
        return CheckpointError(f"{self.file.path}: {self.arch}.{key} {message}")

    def get(self, key: str, kind: type, default: Any = ...) -> Any:
        self.seen.add(key)
        value = self.file.metadata.get(f"{self.arch}.{key}", default)
        if value is ...:
            raise self.error(key, "is missing")
        if value is default:
            return value
        if kind is float and type(value) in (int, float):
            return _shortest(value)
        if type(value) is kind:
            return value
        raise self.error(key, f"is {_brief(value)}; allowed: one {kind.__name__}")

    def positive(self, key: str, default: Any = ...) -> Any:
        value = self.get(key, int, default)
        if value is not None and value < 1:
            raise self.error(key, f"is {value}; it must be at least 1")
        return value

    def refuse_the_rest(self) -> None:
        prefix = f"{self.arch}."
        for key, value in self.file.metadata.items():
            if key.startswith(prefix) and key.removeprefix(prefix) not in self.seen:
                raise self.error(
                    key.removeprefix(prefix), f"is {_brief(value)}: this is not implemented"
                )


def _shortest(value: float) -> float:
    """A float32 of the file as the shortest decimal, as config.json has it: 1e-05."""
    return float(str(np.float32(value)))


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else f"{text[:77]}..."


def _common(f: _Fields) -> dict[str, Any]:
    heads = f.positive("attention.head_count")
    hidden = f.positive("embedding_length")
    head_dim = f.positive("attention.key_length", None) or hidden // heads
    for key in ("attention.value_length", "rope.dimension_count"):
        if f.positive(key, head_dim) != head_dim:
            raise f.error(key, f"is {f.get(key, int)}; allowed: the head size, {head_dim}")
    return {
        "vocab_size": _vocab_size(f.file),
        "hidden_size": hidden,
        "intermediate_size": f.positive("feed_forward_length"),
        "num_hidden_layers": f.positive("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": f.positive("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": f.get("attention.layer_norm_rms_epsilon", float),
        "max_position_embeddings": f.positive("context_length"),
        "rope_theta": f.get("rope.freq_base", float, 10000.0),
        "rope_scaling": _rope_scaling(f, head_dim),
        "tie_word_embeddings": "output.weight" not in f.file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in f.file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in f.file.tensors,
        **_token_ids(f.file.metadata),
    }


def _vocab_size(file: GGUFFile) -> int:
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(f"{file.path}: tensor 'token_embd.weight' is missing")
    rows = file.tensors["token_embd.weight"].shape[0]
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if tokens is not None and len(tokens) > rows:
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.tokens has {len(tokens)} entries, but token_embd.weight "
            f"only {rows} rows"
        )
    return rows


def _token_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    eos = [
        metadata[f"tokenizer.ggml.{name}_token_id"]
        for name in ("eos", "eot", "eom")
        if f"tokenizer.ggml.{name}_token_id" in metadata
    ]
    eos = list(dict.fromkeys(eos))
    return {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }


def _rope_scaling(f: _Fields, head_dim: int) -> dict[str, Any] | None:
    kind = f.get("rope.scaling.type", str, "none")
    factor = f.get("rope.scaling.factor", float, 1.0)
    # In files older than rope.scaling.*: the linear factor alone.
    linear = f.get("rope.scale_linear", float, 1.0)
    original = f.positive("rope.scaling.original_context_length", None)
    f.get("rope.scaling.finetuned", bool, None)
    if "rope_freqs.weight" in f.file.tensors:
        return _llama3_scaling(f, head_dim)
    if kind == "linear" or (kind == "none" and linear != 1.0):
        return {"rope_type": "linear", "factor": factor if kind == "linear" else linear}
    if kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": factor}
        return scaling | (
            {"original_max_position_embeddings": original} if original is not None else {}
        )
    if kind == "none":
        return None
    raise f.error("rope.scaling.type", f"is {kind!r}; allowed: none, linear, yarn")


def _llama3_scaling(f: _Fields, head_dim: int) -> dict[str, Any]:
    """Llama 3.1's scaling from the table of divisors that the converter wrote in its place.

    The table does not name its four parameters, so the published ones are tried; a table that they
    do not reproduce is refused.
    """
    table = f.file.read("rope_freqs.weight")
    theta = f.get("rope.freq_base", float, 10000.0)
    base = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling = {
        "rope_type": "llama3",
        "factor": float(table.max()),
        "original_max_position_embeddings": 8192,
        **base,
    }
    expected = _llama3_divisors(scaling, theta, head_dim)
    if table.shape != expected.shape or not np.allclose(table, expected, rtol=1e-4):
        raise CheckpointError(
            f"{f.file.path}: rope_freqs.weight is not a table of Llama 3 with low_freq_factor 1, "
            "high_freq_factor 4 and original_max_position_embeddings 8192: not implemented"
        )
    return scaling


def _llama3_divisors(scaling: dict[str, Any], theta: float, head_dim: int) -> np.ndarray:
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    factor, low, high = (scaling[k] for k in ("factor", "low_freq_factor", "high_freq_factor"))
    turns = scaling["original_max_position_embeddings"] / wavelength
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def _llama(f: _Fields) -> dict[str, Any]:
    return {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu"}


def _qwen3(f: _Fields) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_act": "silu",
        "use_sliding_window": False,
        "sliding_window": None,
    }


# What llama.cpp hard-codes for gemma3 because its files do not say it.
_GEMMA3_PATTERN = 6
_GEMMA3_LOCAL_THETA = 10000.0
_GEMMA3_27B_LAYERS = 62


def _gemma3(f: _Fields) -> dict[str, Any]:
    layers, heads = f.positive("block_count"), f.positive("attention.head_count")
    hidden = f.positive("embedding_length")
    head_dim = f.positive("attention.key_length", None) or hidden // heads
    pattern = f.positive("attention.sliding_window_pattern", _GEMMA3_PATTERN)
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if f.get(key, float, None):
            raise f.error(key, f"is {f.get(key, float)}; allowed: none or 0")
    return {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        # Of the embedding's factor, sqrt(hidden): blocks stand for float32 numbers.
        "dtype": "float32",
        "rope_theta": f.get("rope.freq_base", float, 1_000_000.0),
        "rope_local_base_freq": f.get("rope.freq_base_swa", float, _GEMMA3_LOCAL_THETA),
        "sliding_window": f.positive("attention.sliding_window"),
        "layer_types": [
            "full_attention" if (i + 1) % pattern == 0 else "sliding_attention"
            for i in range(layers)
        ],
        # Only the 27B model departs from the head size.
        "query_pre_attn_scalar": hidden // heads if layers == _GEMMA3_27B_LAYERS else head_dim,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }


_ARCHITECTURES = {"llama": _llama, "qwen3": _qwen3, "gemma3": _gemma3}

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_BLOCKS = {
    "llama": _BLOCK | {"ffn_norm": "post_attention_layernorm"},
    "qwen3": _BLOCK | _QK_NORMS | {"ffn_norm": "post_attention_layernorm"},
    # gemma3 also normalises what a block adds, so "after attention" is another norm there.
    "gemma3": _BLOCK
    | _QK_NORMS
    | {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}
# Read elsewhere (`_rope_scaling`) or a table that the configuration already gives.
_NOT_WEIGHTS = {"rope_freqs.weight"}


def _names(arch: str, layers: int) -> Iterator[tuple[str, str, bool]]:
    """(GGUF name, Hugging Face name, required) of every tensor a file may have."""
    for gguf, hf in _TOP.items():
        yield gguf, hf, gguf != "output.weight"
    for i in range(layers):
        for gguf, hf in _BLOCKS[arch].items():
            yield f"blk.{i}.{gguf}.weight", f"model.layers.{i}.{hf}.weight", True
            if "norm" not in gguf:
                yield f"blk.{i}.{gguf}.bias", f"model.layers.{i}.{hf}.bias", False


def _sources(file: GGUFFile, arch: str, config: dict[str, Any]) -> dict[str, GGUFSource]:
    unknown = set(file.tensors) - _NOT_WEIGHTS
    sources = {}
    for gguf, hf, required in _names(arch, config["num_hidden_layers"]):
        if gguf in file.tensors:
            unknown.discard(gguf)
            sources[hf] = GGUFSource(gguf, _transform(file, arch, config, gguf))
        elif required:
            raise CheckpointError(f"{file.path}: tensor {gguf!r} is missing")
    if unknown:
        names = sorted(unknown)
        raise CheckpointError(
            f"{file.path}: {len(names)} tensors are not part of a {arch} model: "
            f"{', '.join(names[:5])}"
        )
    return sources


def _transform(
    file: GGUFFile, arch: str, config: dict[str, Any], name: str
) -> PermuteRows | Add | None:
    if arch == "gemma3" and name.endswith("norm.weight"):
        # The converter folds the 1 of x * (1 + w) into w.
        if file.tensors[name].dtype is None:
            kind = file.tensors[name].kind
            raise CheckpointError(
                f"{file.path}: tensor {name!r} is {kind}; allowed: F32, F16, BF16"
            )
        return Add(-1.0)
    if arch == "llama" and (".attn_q." in name or ".attn_k." in name):
        heads = config["num_attention_heads" if ".attn_q." in name else "num_key_value_heads"]
        expected = heads * config["head_dim"]
        info = file.tensors[name]
        rows = info.shape[0]
        if rows != expected:
            raise CheckpointError(
                f"{file.path}: tensor {name!r} has {rows} rows; the metadata gives {expected}"
            )
        return PermuteRows(_split_half_rows(heads, config["head_dim"]))
    return None


def _split_half_rows(heads: int, head_dim: int) -> np.ndarray:
    """Undoes llama.cpp's interleaved rope layout: int64 [heads * head_dim].

    Within a head the file holds dimension pairs (j, j + head_dim / 2) as neighbours; Hugging Face
    holds all first halves, then all second ones.
    """
    rows = np.arange(heads * head_dim).reshape(heads, head_dim // 2, 2)
    return rows.swapaxes(1, 2).reshape(-1)
