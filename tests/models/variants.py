"""Tiny checkpoints of variants that releases do not use, with what transformers computes for them.

    python tests/models/variants.py FOLDER [NAME ...]       # needs torch and transformers, not jax

writes one golden directory a variant (see docs/testing.md). Those under tests/models/variants were
made so; `pytest -m parity` makes others, of another seed, and compares with them live.
"""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path
from typing import Any

YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 10000.0,
}
SMALL = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 40, "max_position_embeddings": 256}
GREEDY = 8

VARIANTS: dict[str, dict[str, Any]] = {
    # Groups, unnormalised weights, two shared experts, tied, yarn on odd parts of a head.
    "glm4_moe_groups": {
        "model_type": "glm4_moe", "num_hidden_layers": 5, "num_attention_heads": 6,
        "num_key_value_heads": 3, "head_dim": 20, "moe_intermediate_size": 12,
        "num_experts_per_tok": 4, "n_shared_experts": 2, "n_routed_experts": 12,
        "routed_scaling_factor": 1.7, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 2,
        "norm_topk_prob": False, "use_qk_norm": False, "attention_bias": False,
        "tie_word_embeddings": True, "num_nextn_predict_layers": 0,
        "rope_parameters": {**YARN, "partial_rotary_factor": 0.4},
    },
    # No dense layer, one key head a query head, a linear rope.
    "glm4_moe_linear": {
        "model_type": "glm4_moe", "num_hidden_layers": 3, "num_attention_heads": 5,
        "num_key_value_heads": 5, "head_dim": 8, "moe_intermediate_size": 12,
        "num_experts_per_tok": 3, "n_routed_experts": 9, "n_group": 3, "topk_group": 1,
        "first_k_dense_replace": 0, "use_qk_norm": True, "attention_bias": True,
        "num_nextn_predict_layers": 0,
        "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 5000.0},
    },
    # The default pattern of layers, sparse ones at every second, biases, tied, yarn.
    "flint_steps": {
        "model_type": "flint", "num_hidden_layers": 10, "num_attention_heads": 6,
        "num_key_value_heads": 2, "head_dim": 12, "sliding_window": 7, "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 12, "num_experts_per_tok": 2, "num_experts": 5,
        "norm_topk_prob": False, "attention_bias": True, "tie_word_embeddings": True,
        "rope_parameters": YARN, "mlp_only_layers": [0, 3], "decoder_sparse_step": 2,
    },
    # A window of the token itself.
    "flint_window": {
        "model_type": "flint", "num_hidden_layers": 3, "num_attention_heads": 3,
        "num_key_value_heads": 3, "head_dim": 8, "sliding_window": 1, "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 12, "num_experts_per_tok": 5, "num_experts": 5,
        "layer_types": ["sliding_attention"] * 3, "mlp_only_layers": [],
    },
    # Groups, biases, unscaled values, yarn on full layers and the default one on sliding ones.
    "mimo_v2_flash_groups": {
        "model_type": "mimo_v2_flash", "num_hidden_layers": 6, "num_attention_heads": 12,
        "num_key_value_heads": 3, "head_dim": 20, "v_head_dim": 10, "sliding_window": 6,
        "moe_intermediate_size": 8, "num_experts_per_tok": 3, "n_routed_experts": 8, "n_group": 4,
        "topk_group": 2, "attention_bias": True, "attention_value_scale": None,
        "norm_topk_prob": False, "routed_scaling_factor": 2.0,
        "rope_parameters": {
            "full_attention": {**YARN, "partial_rotary_factor": 0.4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    # The default pattern of layers and ropes, the other spelling of the window, tied.
    "mimo_v2_flash_defaults": {
        "model_type": "mimo_v2_flash", "num_hidden_layers": 7, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 24, "v_head_dim": 16, "sliding_window_size": 5,
        "moe_intermediate_size": 8, "num_experts_per_tok": 3, "n_routed_experts": 8,
        "routed_scaling_factor": None, "tie_word_embeddings": True,
    },
    "llama_biases": {
        "model_type": "llama", "num_hidden_layers": 3, "num_attention_heads": 6,
        "num_key_value_heads": 2, "head_dim": 12, "hidden_size": 48,
        "attention_bias": True, "mlp_bias": True, "rope_parameters": YARN,
    },
    "gemma3_capped": {
        "model_type": "gemma3_text", "num_hidden_layers": 7, "num_attention_heads": 6,
        "num_key_value_heads": 2, "head_dim": 12, "hidden_size": 48, "sliding_window": 5,
        "query_pre_attn_scalar": 20, "final_logit_softcapping": 5.0,
    },
}  # fmt: skip


def make(name: str, folder: Path, seed: int = 0) -> None:
    """Writes the golden directory `folder` of a variant."""
    import numpy as np
    import torch
    from safetensors.numpy import save_file
    from safetensors.torch import load_file
    from safetensors.torch import save_file as save_torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {**SMALL, **VARIANTS[name]}
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    config._attn_implementation = "eager"
    seed += zlib.crc32(name.encode()) % 1000
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            _fill(key, tensor, config.model_type)
    model.save_pretrained(folder)
    rng = np.random.default_rng(seed)
    found: dict[str, np.ndarray] = {}
    lengths = (71, 23)
    for at, length in enumerate(lengths):
        ids = torch.tensor(rng.integers(0, config.vocab_size, length))
        with torch.no_grad():
            logits = model(ids[None]).logits[0].numpy()
            greedy = ids
            for _ in range(GREEDY):
                following = model(greedy[None]).logits[0, -1].argmax()
                greedy = torch.cat([greedy, following[None]])
        found[f"prompt_{at}.input_ids"] = ids.numpy().astype(np.int32)
        found[f"prompt_{at}.logits"] = logits.astype(np.float32)
        found[f"prompt_{at}.greedy"] = greedy[length:].numpy().astype(np.int32)
    save_file(found, folder / "golden.safetensors")
    facts = {"family": config.model_type, "variant": name, "seed": seed, "prompts": lengths}
    (folder / "golden.json").write_text(json.dumps(facts, indent=1) + "\n")
    (folder / "generation_config.json").unlink(missing_ok=True)
    # Half the bytes, the same numbers.
    stored = load_file(folder / "model.safetensors")
    halves = {key: tensor.to(torch.bfloat16) for key, tensor in stored.items()}
    save_torch(halves, folder / "model.safetensors")


def _fill(key: str, tensor: Any, family: str) -> None:
    """Random values at which every tensor matters, rounded to bfloat16 as releases are."""
    import torch

    if "inv_freq" in key or "embed_scale" in key:
        return
    draw = torch.randn(tensor.shape)
    if tensor.ndim >= 2:
        draw = draw if "embed" in key else draw / tensor.shape[-1] ** 0.5
    elif "norm" in key:
        draw = 0.2 * draw + (0.0 if family == "gemma3_text" else 1.0)
    elif "bias" in key:
        draw = 0.3 * draw
    tensor.copy_(draw.to(torch.bfloat16))


def main(arguments: list[str]) -> None:
    root, *names = arguments
    for name in names or VARIANTS:
        folder = Path(root) / name
        folder.mkdir(parents=True, exist_ok=True)
        make(name, folder)


if __name__ == "__main__":
    main(sys.argv[1:])
