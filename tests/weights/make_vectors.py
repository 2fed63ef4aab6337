"""Makes vectors of unseen seeds and odd shapes with the libraries that write such files.

Needs torch, compressed-tensors, transformers and gguf:

    python make_vectors.py FOLDER SEED
    sparkjax verify --vectors FOLDER
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationScheme,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import save_file

EXACT = {"mode": "exact", "subnormal_as_zero": True}
CLOSE = {"mode": "close", "rtol": 1e-6, "atol_scale": 2e-7}
BLOCKS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
          "IQ4_XS", "MXFP4", "NVFP4")  # fmt: skip
Case = tuple[str, dict[str, torch.Tensor], torch.Tensor, dict[str, Any]]
"""Name, tensors by role, the expected numbers, and further facts of the index."""


def scheme_of(args: QuantizationArgs, name: str) -> QuantizationScheme:
    return QuantizationScheme(targets=["Linear"], weights=args, format=name)


def config_of(scheme: QuantizationScheme) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": scheme.format,
        "quantization_status": "compressed",
        "ignore": [],
        "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
    }


def weight_of(rng: torch.Generator, n: int, k: int) -> torch.Tensor:
    """Numbers of many sizes, with an empty row, a few zeros and an outlier."""
    weight = torch.randn(n, k, generator=rng) * torch.exp(torch.randn(n, 1, generator=rng))
    weight[0] = 0
    weight[-1, ::3] = 0
    weight[n // 2, k // 2] = 40
    return weight


def extremes(weight: torch.Tensor, args: QuantizationArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest of each block, group, row or of all."""
    n, k = weight.shape
    match str(args.strategy.value if hasattr(args.strategy, "value") else args.strategy):
        case "tensor":
            return weight.min().reshape(1), weight.max().reshape(1)
        case "channel":
            return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
        case "block":
            bn, bk = args.block_structure
            padded = torch.nn.functional.pad(weight, (0, -k % bk, 0, -n % bn))
            grid = padded.reshape(-(-n // bn), bn, -(-k // bk), bk)
            return grid.amin((1, 3)), grid.amax((1, 3))
    grid = weight.reshape(n, -1, args.group_size)
    return grid.amin(-1), grid.amax(-1)


def compressed(
    name: str, weight: torch.Tensor, args: QuantizationArgs, kind: str, rule: dict[str, Any]
) -> Case:
    scheme = scheme_of(args, kind)
    low, high = extremes(weight, args)
    state = {"weight": weight}
    whole = None
    if "tensor_group" in str(args.strategy):
        whole = generate_gparam(weight.min(), weight.max())
        state["weight_global_scale"] = whole
    scale, zero = calculate_qparams(low, high, args, global_scale=whole)
    state["weight_scale"] = scale
    if not args.symmetric:
        state["weight_zero_point"] = zero
    packed = BaseCompressor.get_value_from_registry(kind).compress(dict(state), scheme)
    n, k = weight.shape
    if kind == "pack-quantized":
        codes = unpack_from_int32(packed["weight_packed"], args.num_bits, weight.shape)
    elif "weight_packed" in packed:
        codes = unpack_fp4_from_uint8(packed["weight_packed"], n, k, dtype=torch.float32)
    else:
        codes = packed["weight"]
    numbers = packed["weight_scale"]
    if numbers.dtype == torch.uint8:
        numbers = torch.exp2(numbers.float() - 127)
    expected = dequantize(
        codes,
        numbers.float(),
        None if args.symmetric else zero,
        args,
        dtype=torch.float32,
        global_scale=whole,
    )
    return name, packed, expected.float(), {
        "decoder": kind, "layout": "out,in", "compare": rule, "params": {},
        "quantization_config": config_of(scheme),
    }  # fmt: skip


def compressed_cases(rng: torch.Generator, odd: np.random.Generator) -> Iterator[Case]:
    def size(low: int, high: int, step: int = 1) -> int:
        return int(odd.integers(low, high)) * step

    for strategy, extra in (
        ("tensor", {}),
        ("channel", {}),
        ("block", {"block_structure": [128, 128]}),
        ("block", {"block_structure": [size(3, 20), size(3, 40)]}),
    ):
        args = QuantizationArgs(num_bits=8, type="float", strategy=strategy, **extra)
        weight = weight_of(rng, size(5, 300), size(8, 400))
        name = f"fp8_{strategy}_{'x'.join(map(str, weight.shape))}"
        yield compressed(name, weight, args, "float-quantized", EXACT)
    for bits in range(2, 9):
        for symmetric in (True, False):
            group = size(1, 5, 16)
            args = QuantizationArgs(
                num_bits=bits, type="int", strategy="group", group_size=group, symmetric=symmetric
            )
            weight = weight_of(rng, size(3, 12, 8), size(1, 6, group))
            name = f"int{bits}_g{group}_{'sym' if symmetric else 'asym'}"
            yield compressed(name, weight, args, "pack-quantized", CLOSE)
        args = QuantizationArgs(num_bits=bits, type="int", strategy="channel", symmetric=True)
        weight = weight_of(rng, size(3, 40), size(7, 90))
        yield compressed(
            f"int{bits}_channel_{weight.shape[1]}", weight, args, "pack-quantized", CLOSE
        )
    args = QuantizationArgs(num_bits=8, type="int", strategy="channel", symmetric=True)
    yield compressed("w8a8", weight_of(rng, size(3, 40), size(7, 90)), args, "int-quantized", CLOSE)
    for preset, kind in (
        ("NVFP4A16", "nvfp4-pack-quantized"),
        ("MXFP4A16", "mxfp4-pack-quantized"),
    ):
        args = preset_name_to_scheme(preset, ["Linear"]).weights
        weight = weight_of(rng, size(3, 40), size(1, 9, args.group_size))
        rule = CLOSE if kind.startswith("nv") else EXACT
        yield compressed(preset.lower(), weight, args, kind, rule)


def oss_case(odd: np.random.Generator) -> Case:
    """GPT-OSS's experts, by transformers' own reader."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    e, n, g = (int(odd.integers(1, 6)) for _ in range(3))
    blocks = torch.from_numpy(odd.integers(0, 256, (e, n * 2, g, 16), np.uint8))
    scales = torch.from_numpy(odd.integers(90, 160, (e, n * 2, g), np.uint8))
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    return "gpt_oss", {"blocks": blocks, "scales": scales}, expected.contiguous(), {
        "decoder": "mxfp4_gptoss", "layout": "expert,in,out", "compare": EXACT, "params": {},
        "quantization_config": {"quant_method": "mxfp4"},
    }  # fmt: skip


def gguf_cases(odd: np.random.Generator) -> Iterator[Case]:
    """Random blocks of every kind, by gguf's reader."""
    for kind in BLOCKS:
        type_ = gguf.GGMLQuantizationType[kind]
        _, size = gguf.GGML_QUANT_SIZES[type_]
        rows, blocks = int(odd.integers(1, 9)), int(odd.integers(1, 5))
        data = odd.integers(0, 256, (rows * blocks, size), np.uint8)
        while True:  # a scale may be no number; real files have none such
            with np.errstate(all="ignore"):
                numbers = gguf.quants.dequantize(data, type_).reshape(len(data), -1)
            bad = ~np.isfinite(numbers).all(-1) | (np.abs(numbers) > 1e6).any(-1)
            if not bad.any():
                break
            data[bad] = odd.integers(0, 256, (int(bad.sum()), size), np.uint8)
        tensors = {"data": torch.from_numpy(data.reshape(rows, -1))}
        expected = torch.from_numpy(numbers.reshape(rows, -1).astype(np.float32))
        yield f"gguf_{kind.lower()}", tensors, expected, {
            "decoder": "gguf", "layout": "row,col", "compare": CLOSE, "params": {"type": kind},
        }  # fmt: skip


def build(folder: Path, seed: int) -> int:
    """Writes a vector folder; returns how many cases it has."""
    rng, odd = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    cases, stored = [], {}
    for name, tensors, expected, facts in (
        *compressed_cases(rng, odd), oss_case(odd), *gguf_cases(odd)
    ):  # fmt: skip
        keys = {role: f"{name}/{role}" for role in tensors}
        for role, value in tensors.items():
            stored[keys[role]] = value.detach().contiguous()
        stored[f"{name}/expected"] = expected.contiguous()
        cases.append({
            "name": name, "file": "vectors.safetensors",
            "tensors": {role: {"key": key} for role, key in keys.items()},
            "expected": {"key": f"{name}/expected"}, **facts,
        })  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    save_file(stored, folder / "vectors.safetensors")
    (folder / "index.json").write_text(json.dumps({"cases": cases}))
    return len(cases)


if __name__ == "__main__":
    print(build(Path(sys.argv[1]), int(sys.argv[2])), "cases")
