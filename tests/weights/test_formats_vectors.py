"""Every kept vector by its own rule, as loading would read it; and readings that are wrong."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparkjax.weights import vectors
from sparkjax.weights.errors import CheckpointError
from sparkjax.weights.formats import bits, exl3
from sparkjax.weights.safetensors import SafetensorsFile

FOLDER = Path(__file__).parents[1] / "data" / "quant_vectors"
INDEX = json.loads((FOLDER / "index.json").read_text())
CASES = {case["name"]: case for case in INDEX["cases"]}
FILES = {name: SafetensorsFile(FOLDER / name) for name in {c["file"] for c in INDEX["cases"]}}


def stored(case: dict) -> dict[str, np.ndarray]:
    file = FILES[case["file"]]
    return {role: np.array(file.read(entry["key"])) for role, entry in case["tensors"].items()}


def judged(case: dict, tensors: dict[str, np.ndarray]) -> vectors.Line:
    expected = FILES[case["file"]].read(case["expected"]["key"])
    try:
        out = vectors.result(case, tensors)
    except CheckpointError as error:
        return vectors.Line(case["name"], "", None, False, str(error))
    return vectors.compare(case["name"], out, expected, case["compare"])


def test_there_are_89():
    assert len(CASES) == 89


@pytest.mark.parametrize("name", CASES)
def test_vector(name):
    line = judged(CASES[name], stored(CASES[name]))
    assert line.ok, line


def by_decoder(*decoders: str) -> list[str]:
    return [n for n, c in CASES.items() if c.get("decoder") in decoders]


@pytest.mark.parametrize("name", by_decoder("nvfp4_ct", "nvfp4_modelopt", "mxfp4", "mxfp4_gptoss"))
def test_swapped_nibbles_are_noticed(name):
    tensors = stored(CASES[name])
    role = next(r for r in ("weight_packed", "blocks", "weight") if r in tensors)
    raw = tensors[role].view(np.uint8)
    tensors[role] = (raw << 4 | raw >> 4).view(tensors[role].dtype)
    assert not judged(CASES[name], tensors).ok


@pytest.mark.parametrize("name", by_decoder("nvfp4_ct", "nvfp4_modelopt"))
def test_dividing_for_multiplying_is_noticed(name):
    tensors = stored(CASES[name])
    swap = {"weight_global_scale": "weight_scale_2", "weight_scale_2": "weight_global_scale"}
    swap |= {"weight": "weight_packed", "weight_packed": "weight"}
    turned = {swap.get(role, role): a for role, a in tensors.items()}
    whole = next(a for role, a in turned.items() if role in swap and a.size == 1)
    if float(whole.reshape(())) != 1.0:
        assert not judged(CASES[name], turned).ok


@pytest.mark.parametrize("name", by_decoder("gptq", "awq"))
@pytest.mark.parametrize("step", [1, -1])
def test_a_zero_point_off_by_one_is_noticed(name, step):
    tensors = stored(CASES[name])
    one = np.uint32(step & 0xFFFFFFFF)
    tensors["qzeros"] = (tensors["qzeros"].view(np.uint32) + one).view(np.int32)
    assert not judged(CASES[name], tensors).ok


def test_v1_and_v2_zero_points_are_told_apart_by_the_config():
    for name in by_decoder("gptq"):
        case = json.loads(json.dumps(CASES[name]))
        config = case["quantization_config"]
        if case["params"]["bits"] > 4 and config["quant_method"] == "gptq" and case["params"]["bits"] < 8:
            continue  # planar files are v2 whatever they say
        if config["quant_method"] == "gptq":
            config["checkpoint_format"] = "gptq" if config["checkpoint_format"] != "gptq" else "gptq_v2"
        else:
            v1 = config["packing_format"] == "auto_round:auto_gptq"
            config["packing_format"] = "auto_round" if v1 else "auto_round:auto_gptq"
        assert not judged(case, stored(case)).ok, name


def test_a_carry_between_zero_points_is_needed():
    case = CASES["gptq_v1_4bit_zero_point_0"]
    tensors = stored(case)
    fields = bits.unpack(tensors["qzeros"], 4, tensors["scales"].shape[-1])
    tensors["qzeros"] = bits.pack((fields + 1) & 15, 4)
    per_field = {**case, "quantization_config": {"quant_method": "gptq", "checkpoint_format": "gptq_v2", "bits": 4, "group_size": 32}}
    assert not judged(per_field, tensors).ok


@pytest.mark.parametrize("name", ["gptq_v2_4bit_desc_act", "gptq_v1_4bit_desc_act"])
def test_ignoring_the_order_of_activations_is_noticed(name):
    tensors = stored(CASES[name])
    del tensors["g_idx"]
    assert not judged(CASES[name], tensors).ok


@pytest.mark.parametrize("name", by_decoder("pack_quantized"))
def test_an_offset_off_by_one_is_noticed(name):
    case, tensors = CASES[name], stored(CASES[name])
    _, cols = tensors["weight_shape"]
    width = case["params"]["bits"]
    fields = bits.unpack(tensors["weight_packed"], width, int(cols))
    tensors["weight_packed"] = bits.pack((fields + 1) % (1 << width), width)
    assert not judged(case, tensors).ok


@pytest.mark.parametrize("codebook", exl3.CODEBOOKS)
def test_codebooks_are_the_published_tables(codebook):
    import hashlib

    table = exl3.codebook_value(jnp.arange(1 << 16, dtype=jnp.uint32), codebook)
    digest = hashlib.sha256(np.asarray(table).astype("<f2").tobytes()).hexdigest()
    assert digest == INDEX["exl3_codebook_sha256"][codebook]


@pytest.mark.parametrize("name", by_decoder("exlr8"))
def test_exlr8_without_its_rounding_is_noticed(name, monkeypatch):
    case = CASES[name]
    half = vectors.exlr8_half
    monkeypatch.setattr(vectors, "exlr8_half", lambda *a: half(*a).replace(as_e4m3=False))
    assert not judged(case, stored(case)).ok


def test_rules():
    expected = np.array([1.0, -0.0, np.nan, 2.0**-130], np.float32)
    exact = {"mode": "exact"}
    assert vectors.compare("", np.array([1, 0, np.nan, 2.0**-130], np.float32), expected, exact).ok
    flushed = np.array([1, 0, np.nan, 0], np.float32)
    assert not vectors.compare("", flushed, expected, exact).ok
    assert vectors.compare("", flushed, expected, {**exact, "subnormal_as_zero": True}).ok
    close = {"mode": "close", "rtol": 1e-6, "atol_scale": 0.0}
    assert vectors.compare("", np.float32([1.0000005]), np.float32([1]), close).ok
    assert not vectors.compare("", np.float32([1.00001]), np.float32([1]), close).ok
    assert not vectors.compare("", np.float32([np.nan]), np.float32([1]), close).ok
    assert not vectors.compare("", np.zeros((2, 3)), np.zeros((3, 2)), exact).ok
    assert not vectors.compare("", np.float32([-0.0]), np.float32([0.0]), {"mode": "bits"}).ok


def test_the_judge_reports_what_is_off(tmp_path):
    for name in ("index.json", "int.safetensors"):
        (tmp_path / name).write_bytes((FOLDER / name).read_bytes())
    index = {**INDEX, "cases": [CASES["ct_w8a8_int"], CASES["ct_w4a16_g32"]]}
    swapped = json.loads(json.dumps(index))
    swapped["cases"][1]["expected"] = swapped["cases"][0]["expected"]
    (tmp_path / "index.json").write_text(json.dumps(swapped))
    lines = list(vectors.judge(tmp_path))
    assert [line.ok for line in lines] == [True, False]
    assert "expected is" in lines[1].note


def test_numbers_are_the_same_without_jit():
    case = CASES["fp8_block_partial"]
    with jax.disable_jit():
        assert judged(case, stored(case)).ok
