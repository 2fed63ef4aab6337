"""Which tensors make a weight: decided from names, dtypes and shapes, the config breaking ties."""

from __future__ import annotations

import json
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from sparkjax.weights.detect import activation_tensors, detect
from sparkjax.weights.errors import CheckpointError
from sparkjax.weights.formats.awq import AwqTensor
from sparkjax.weights.formats.exl3 import Exl3Tensor
from sparkjax.weights.formats.fp4 import Fp4Tensor
from sparkjax.weights.formats.gptq import GptqTensor
from sparkjax.weights.formats.packed import PackedTensor
from sparkjax.weights.formats.scaled import ScaledTensor
from sparkjax.weights.safetensors import SafetensorsFile

FOLDER = Path(__file__).parents[1] / "data" / "quant_vectors"
INDEX = json.loads((FOLDER / "index.json").read_text())
DTYPES = {
    "f8": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5": np.dtype(ml_dtypes.float8_e5m2),
    "e8": np.dtype(ml_dtypes.float8_e8m0fnu),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    **{name: np.dtype(name) for name in ("f2", "f4", "u1", "i1", "i2", "i4", "i8")},
}


def arrays(**tensors: tuple) -> dict[str, np.ndarray]:
    """x__weight=("f8", 4, 8) -> {"x.weight": ones of that dtype and shape}."""
    return {
        name.replace("__", "."): np.ones(shape, np.uint8).astype(DTYPES[dtype])
        for name, (dtype, *shape) in tensors.items()
    }


def found(tensors: dict[str, np.ndarray], config: dict | None = None):
    facts = {name: (a.dtype, a.shape) for name, a in tensors.items()}
    return detect(facts, {"quantization_config": config or {}})


def built(config: dict | None = None, **tensors: tuple):
    held = arrays(**tensors)
    (stored,) = found(held, config).values()
    assert stored.name == "x.weight"
    return stored.build(held.__getitem__), stored


SIGNATURES = [
    ("FP8", ScaledTensor, {"x__weight": ("f8", 136, 200), "x__weight_scale_inv": ("f4", 2, 2)}),
    ("FP8", ScaledTensor, {"x__weight": ("f8", 136, 200), "x__weight_scale_inv": ("bf16", 2, 2)}),
    ("FP8", ScaledTensor, {"x__weight": ("f8", 256, 128), "x__scale": ("e8", 2, 1)}),
    ("FP8", ScaledTensor, {"x__weight": ("f8", 256, 128), "x__qscale_weight": ("f4", 2, 1)}),
    ("FP8", ScaledTensor, {"x__weight": ("f8", 48, 96), "x__weight_scale": ("f4", 48, 1)}),
    ("FP8", ScaledTensor, {"x__weight": ("f8", 48, 96), "x__weight_scale": ("bf16", 48)}),
    ("FP8", ScaledTensor, {"x__weight": ("f8", 48, 96), "x__weight_scale": ("f4", 1)}),
    ("FP8", ScaledTensor, {"x__weight": ("f8", 48, 96), "x__weight_scale": ("f4",)}),
    ("FP8", ScaledTensor, {"x__weight": ("f8", 3, 48, 96), "x__weight_scale": ("f4", 3)}),
    ("FP8", ScaledTensor, {"x__weight": ("f8", 3, 130, 96), "x__weight_scale_inv": ("f4", 3, 2, 1)}),
    ("MXFP8", ScaledTensor, {"x__weight": ("f8", 16, 80), "x__weight_scale": ("u1", 16, 3)}),
    ("MXFP8", ScaledTensor, {"x__weight": ("f8", 16, 80), "x__weight_scale_inv": ("u1", 16, 3)}),
    (
        "NVFP4",
        Fp4Tensor,
        {
            "x__weight_packed": ("u1", 8, 16),
            "x__weight_scale": ("f8", 8, 2),
            "x__weight_global_scale": ("f4", 1),
        },
    ),
    (
        "NVFP4",
        Fp4Tensor,
        {"x__weight": ("u1", 8, 16), "x__weight_scale": ("f8", 8, 2), "x__weight_scale_2": ("f4",)},
    ),
    ("MXFP4", Fp4Tensor, {"x__weight_packed": ("u1", 8, 32), "x__weight_scale": ("u1", 8, 2)}),
    ("MXFP4", Fp4Tensor, {"x__weight": ("u1", 8, 32), "x__weight_scale": ("u1", 8, 2)}),
    ("MXFP4", Fp4Tensor, {"x__weight": ("i1", 8, 32), "x__scale": ("e8", 8, 2)}),
    (
        "pack-quantized",
        PackedTensor,
        {
            "x__weight_packed": ("i4", 1, 4),
            "x__weight_scale": ("bf16", 1, 1),
            "x__weight_shape": ("i8", 2),
        },
    ),
    ("int8", ScaledTensor, {"x__weight": ("i1", 8, 32), "x__weight_scale": ("f4", 8, 1)}),
    (
        "AWQ",
        AwqTensor,
        {"x__qweight": ("i4", 64, 4), "x__qzeros": ("i4", 2, 4), "x__scales": ("f2", 2, 32)},
    ),
    (
        "GPTQ",
        GptqTensor,
        {"x__qweight": ("i4", 8, 32), "x__qzeros": ("i4", 2, 4), "x__scales": ("f2", 2, 32)},
    ),
    (
        "EXL3",
        Exl3Tensor,
        {"x__trellis": ("i2", 8, 16, 40), "x__suh": ("f2", 128), "x__svh": ("f2", 256)},
    ),
    (
        "EXL3",
        Exl3Tensor,
        {"x__trellis": ("i2", 8, 16, 32), "x__su": ("i2", 8), "x__sv": ("i2", 16)},
    ),
]


@pytest.mark.parametrize(("name", "kind", "tensors"), SIGNATURES)
def test_signatures_need_no_config(name, kind, tensors):
    if name == "pack-quantized":
        held = arrays(**tensors)
        held["x.weight_shape"] = np.array([1, 32])
        (stored,) = found(held).values()
        node = stored.build(held.__getitem__)
        assert node.shape == (1, 32)
    else:
        node, stored = built(**tensors)
    assert isinstance(node, kind) and stored.format == name
    assert set(stored.tensors) == {n.replace("__", ".") for n in tensors}


@pytest.mark.parametrize("method", ["fp8", "modelopt", "gptq", "awq", "compressed-tensors", "mxfp4"])
def test_a_lying_config_changes_nothing(method):
    lie = {"quant_method": method, "bits": 4, "group_size": 128, "weight_block_size": [128, 128]}
    for name, kind, tensors in SIGNATURES:
        if name not in ("pack-quantized", "GPTQ", "AWQ"):
            node, stored = built(lie, **tensors)
            assert isinstance(node, kind) and stored.format == name
    plain = arrays(x__weight=("bf16", 8, 32), y__weight=("f4", 8, 32), z__tid2eid=("i8", 8, 2))
    assert not found(plain, lie)


def test_fused_experts_have_no_module_of_their_own():
    held = arrays(
        m__gate_up_proj_blocks=("u1", 2, 6, 4, 16),
        m__gate_up_proj_scales=("u1", 2, 6, 4),
        m__down_proj=("f8", 2, 128, 64),
        m__down_proj_scale_inv=("f4", 2, 1, 1),
        m__gate_up_proj_bias=("bf16", 2, 6),
    )
    stored = found(held)
    assert {n: s.format for n, s in stored.items()} == {
        "m.gate_up_proj": "MXFP4",
        "m.down_proj": "FP8",
    }
    assert stored["m.gate_up_proj"].build(held.__getitem__).shape == (2, 6, 128)


def test_activation_scales_belong_to_the_weight_and_are_not_read():
    held = arrays(
        x__weight=("f8", 8, 32),
        x__weight_scale=("f4",),
        x__input_scale=("f4",),
        x__k_scale=("f4",),
        attn__v_scale=("f4",),
    )
    (stored,) = found(held).values()
    assert set(stored.unread) == {"x.input_scale", "x.k_scale"}
    assert activation_tensors({n: (a.dtype, a.shape) for n, a in held.items()}) == {
        "x.input_scale",
        "x.k_scale",
        "attn.v_scale",
    }


QWEIGHT = {"x__qweight": ("i4", 8, 32), "x__qzeros": ("i4", 2, 4), "x__scales": ("f2", 2, 32)}
AWQ = {"x__qweight": ("i4", 64, 4), "x__qzeros": ("i4", 2, 4), "x__scales": ("f2", 2, 32)}
REFUSED = [
    ("float8_e5m2", None, {"x__weight": ("e5", 8, 32), "x__weight_scale": ("f4",)}),
    ("without scales", None, {"x__weight": ("f8", 8, 32)}),
    ("without scales", None, {"x__weight": ("i1", 8, 32)}),
    ("32 codes", None, {"x__weight_packed": ("u1", 8, 24), "x__weight_scale": ("u1", 8, 1)}),
    ("uint8 [4, 32]", None, {"x__weight": ("u1", 4, 32), "x__weight_scale": ("f4", 8, 1)}),
    ("exactly one", None, {"x__weight": ("u1", 8, 16), "x__weight_scale": ("f8", 8, 2)}),
    ("same meaning", None, {"x__weight": ("f8", 8, 32), "x__weight_scale": ("f4",), "x__scale": ("f4",)}),
    ("pre_quant_scale", None, {"x__weight": ("f8", 8, 32), "x__weight_scale": ("f4",), "x__pre_quant_scale": ("f4", 32)}),
    ("does not fit", None, {"x__weight": ("f8", 8, 32), "x__weight_scale_inv": ("f4", 3, 3)}),
    ("qzeros", None, {"x__qweight": ("i4", 8, 32), "x__scales": ("f2", 2, 32)}),
    ("marlin", {"quant_method": "gptq", "checkpoint_format": "marlin"}, QWEIGHT),
    ("pack_dtype", {"quant_method": "gptq", "pack_dtype": "int16"}, QWEIGHT),
    ("gemv", {"quant_method": "awq", "version": "gemv"}, AWQ),
    ("rotat", {"quant_method": "auto-round", "rotation_config": {"a": 1}}, QWEIGHT),
    ("rotat", {"transform_config": {"a": 1}}, {"x__weight": ("f8", 8, 32), "x__weight_scale": ("f4",)}),
    ("marlin-24", {"sparsity_config": {"format": "marlin-24"}}, {"x__weight": ("f8", 8, 32), "x__weight_scale": ("f4",)}),
    ("packing_format", {"quant_method": "auto-round", "packing_format": "auto_round:what"}, QWEIGHT),
    ("3-D", None, {"x__trellis": ("i2", 8, 40), "x__suh": ("f2", 128), "x__svh": ("f2", 256)}),
    ("bits a weight", None, {"x__trellis": ("i2", 8, 16, 44), "x__suh": ("f2", 128), "x__svh": ("f2", 256)}),
    ("mcg is", None, {"x__trellis": ("i2", 8, 16, 48), "x__suh": ("f2", 128), "x__svh": ("f2", 256), "x__mcg": ("i4",)}),
]


@pytest.mark.parametrize(("reason", "config", "tensors"), REFUSED)
def test_what_is_unknown_is_refused_by_name(reason, config, tensors):
    with pytest.raises(CheckpointError) as caught:
        built(config, **tensors)
    message = str(caught.value)
    assert reason in message and "'x.weight'" in message
    main = next(n for n in tensors if n.split("__")[1] in ("weight", "qweight", "trellis", "weight_packed"))
    assert DTYPES[tensors[main][0]].name in message


@pytest.mark.parametrize(
    ("role", "value"),
    [("x.weight_scale", np.nan), ("x.weight_scale", np.inf)],
)
def test_scales_that_are_no_numbers_are_refused(role, value):
    held = arrays(x__weight=("f8", 48, 96), x__weight_scale=("f4", 48, 1))
    held[role][7] = value
    (stored,) = found(held).values()
    with pytest.raises(CheckpointError, match=r"x\.weight_scale.*\[7, 0\]"):
        stored.build(held.__getitem__)
    stored.build(held.__getitem__, check=False)


@pytest.mark.parametrize("dtype", ["e8", "u1"])
def test_ff_is_refused(dtype):
    held = arrays(x__weight=("i1", 8, 32), x__scale=(dtype, 8, 2))
    held["x.scale"].view(np.uint8)[2, 1] = 0xFF
    (stored,) = found(held).values()
    with pytest.raises(CheckpointError, match=r"x\.scale.*\[2, 1\]"):
        stored.build(held.__getitem__)


def test_settings_of_one_module():
    config = {
        "quant_method": "gptq",
        "checkpoint_format": "gptq_v2",
        "bits": 4,
        "group_size": 32,
        "dynamic": {r"-:lm_head": {}, r"+:x": {"group_size": 48, "bits": 8}},
    }
    node, _ = built(
        config, x__qweight=("i4", 20, 32), x__qzeros=("i4", 2, 8), x__scales=("f2", 2, 32)
    )
    assert (node.width, node.group, node.cols, node.minus_one) == (8, 48, 80, False)


@pytest.mark.parametrize("case", INDEX["cases"], ids=lambda c: c["name"])
def test_vectors_are_detected(case):
    """By the tensors' names alone, where the case says which format it is."""
    if case["decoder"] in ("gguf", "bf16", "exl3_inner", "exlr8"):
        return
    file = SafetensorsFile(FOLDER / case["file"])
    prefix = "x_" if case["decoder"] == "mxfp4_gptoss" else "x."
    facts = {
        f"{prefix}{role}": (file.tensors[t["key"]].dtype, file.tensors[t["key"]].shape)
        for role, t in case["tensors"].items()
    }
    (stored,) = detect(facts, {}).values()
    wanted = {"fp8": "FP8", "mxfp8": "MXFP8", "nvfp4": "NVFP4", "mxfp4": "MXFP4", "awq": "AWQ"}
    wanted |= {"gptq": "GPTQ", "auto-round": "GPTQ", "exl3": "EXL3", "pack-quantized": "pack-quantized"}
    wanted |= {"int-quantized": "int8"}
    key = next(k for k in wanted if case["format"].startswith(k))
    assert stored.format == wanted[key] and stored.problem is None
    assert set(stored.tensors) == set(facts)


ZEROS = [
    # (roles and shapes of a weight of 16 outputs and 64 inputs of 4 bits, the name, its wrong shapes)
    ({"qweight": (8, 16), "scales": (2, 16)}, "qzeros", [(1, 2), (3, 2), (0, 2)], np.int32),
    ({"weight_packed": (16, 8), "weight_scale": (16, 2)}, "weight_zero_point", [(1, 2), (3, 2), (2, 1)], np.int32),
    ({"weight_packed": (16, 8), "weight_scale": (16, 2)}, "weight_zero_point", [(1, 2), (7, 2), (16, 1)], np.int8),
]  # fmt: skip


@pytest.mark.parametrize("shapes, name, wrong, dtype", ZEROS, ids=["gptq", "packed", "unpacked"])
def test_zero_points_of_another_shape_are_refused(shapes, name, wrong, dtype):
    """Not when a first program is traced, and never read as something else."""
    arrays = {n: np.ones(s, np.float16 if "scale" in n else np.int32) for n, s in shapes.items()}
    arrays["weight_shape"] = np.array([16, 64])
    for shape in wrong:
        held = {f"m.{n}": a for n, a in (arrays | {name: np.zeros(shape, dtype)}).items()}
        found = detect({n: (a.dtype, a.shape) for n, a in held.items()}, {"quantization_config": {"bits": 4}})
        with pytest.raises(CheckpointError, match=rf"m.weight.*{re.escape(str(list(shape)))}"):
            found["m.weight"].build(held.__getitem__)
