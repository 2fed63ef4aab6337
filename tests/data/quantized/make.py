"""Re-encodes tiny golden checkpoints with compressed-tensors; run by hand, results are kept.

    python make.py GOLDEN_FOLDER    (needs torch and compressed-tensors 0.20.1)

Each FAMILY-FORMAT.safetensors holds only what replaces linears of the golden checkpoint (fused
experts come apart, under the names that such checkpoints have); its metadata says what is replaced
and holds the quantization_config.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationScheme,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file

FAMILIES = ("llama", "qwen3", "gemma3", "glm_moe_dsa", "qwen3_5_moe")
BLOCK = 32  # tiny matrices should have several blocks, some of them partial


def schemes() -> dict[str, tuple[str, QuantizationScheme]]:
    weights = {
        "fp8": QuantizationArgs(
            num_bits=8, type="float", strategy="block", block_structure=[BLOCK, BLOCK]
        ),
        "int4": QuantizationArgs(
            num_bits=4, type="int", strategy="group", group_size=32, symmetric=False
        ),
        "nvfp4": preset_name_to_scheme("NVFP4A16", ["Linear"]).weights,
        "mxfp4": preset_name_to_scheme("MXFP4A16", ["Linear"]).weights,
    }
    names = {
        "fp8": "float-quantized",
        "int4": "pack-quantized",
        "nvfp4": "nvfp4-pack-quantized",
        "mxfp4": "mxfp4-pack-quantized",
    }
    return {
        key: (names[key], QuantizationScheme(targets=["Linear"], weights=args, format=names[key]))
        for key, args in weights.items()
    }


def split(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """One linear, or the experts of a fused tensor as linears of their own."""
    if weight.ndim == 2:
        return {name: weight} if name.endswith(".weight") else {}
    prefix, _, last = name.rpartition(".")
    if weight.ndim != 3 or ".experts" not in prefix:
        return {}
    found = {}
    for e, one in enumerate(weight):
        if last == "gate_up_proj":
            gate, up = one.chunk(2)
            found |= {f"{prefix}.{e}.gate_proj.weight": gate, f"{prefix}.{e}.up_proj.weight": up}
        else:
            found[f"{prefix}.{e}.{last}.weight"] = one
    return found


def skipped(name: str) -> bool:
    parts = name.split(".")
    return "layers" not in parts or "visual" in parts or any(
        p in ("gate", "norm", "conv1d", "indexer", "shared_expert_gate", "in_proj_a", "in_proj_b")
        for p in parts
    )


def amax(weight: torch.Tensor, args: QuantizationArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest weight of each block or group."""
    n, k = weight.shape
    if args.strategy == "block":
        grid = torch.nn.functional.pad(weight, (0, -k % BLOCK, 0, -n % BLOCK))
        grid = grid.reshape(grid.shape[0] // BLOCK, BLOCK, -1, BLOCK)
        return grid.amin((1, 3)), grid.amax((1, 3))
    grid = weight.reshape(n, -1, args.group_size)
    return grid.amin(-1), grid.amax(-1)


def compress(weight: torch.Tensor, name: str, scheme: QuantizationScheme) -> dict:
    args, weight = scheme.weights, weight.float()
    low, high = amax(weight, args)
    state = {"weight": weight}
    whole = None
    if args.strategy == "tensor_group":
        whole = generate_gparam(weight.min(), weight.max())
        state["weight_global_scale"] = whole
    scale, zero = calculate_qparams(low, high, args, global_scale=whole)
    state["weight_scale"] = scale
    if not args.symmetric:
        state["weight_zero_point"] = zero
    return BaseCompressor.get_value_from_registry(name).compress(state, scheme)


def main(golden: Path) -> None:
    for family in FAMILIES:
        tensors = load_file(golden / family / "model.safetensors")
        for key, (name, scheme) in schemes().items():
            out, replaced = {}, []
            for fused, weight in tensors.items():
                parts = {} if skipped(fused) else split(fused, weight)
                group = scheme.weights.group_size or 1
                if not parts or any(w.shape[1] % group for w in parts.values()):
                    continue
                replaced.append(fused)
                for module, one in parts.items():
                    stem = module.removesuffix(".weight")
                    for role, value in compress(one, name, scheme).items():
                        out[f"{stem}.{role}"] = value.contiguous()
            config = {
                "quant_method": "compressed-tensors",
                "format": name,
                "quantization_status": "compressed",
                "ignore": ["lm_head"],
                "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
            }
            facts = {"replaced": json.dumps(replaced), "quantization_config": json.dumps(config)}
            target = Path(__file__).parent / f"{family}-{key}.safetensors"
            save_file(out, target, metadata=facts)
            print(target.name, len(replaced), "replaced", target.stat().st_size)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
