"""Quantized checkpoints load as they are, and compute what their dequantized weights compute.

The checkpoints are tiny golden ones re-encoded by compressed-tensors (tests/data/quantized), or by
a few lines here for the names that other writers use.
"""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from sparkjax import model as models
from sparkjax.model import Model
from sparkjax.verify import errors
from sparkjax.weights import formats, load
from sparkjax.weights.checkpoint import open_checkpoint
from sparkjax.weights.errors import CheckpointError
from sparkjax.weights.formats import bits
from sparkjax.weights.formats.exl3 import Exl3Tensor
from sparkjax.weights.formats.fp4 import Fp4Tensor
from sparkjax.weights.formats.mixed import Mixed
from sparkjax.weights.formats.packed import PackedTensor
from sparkjax.weights.formats.scaled import ScaledTensor
from sparkjax.weights.safetensors import DTYPES, SafetensorsFile

TESTS = Path(__file__).parents[1]
GOLDEN, DATA = TESTS / "golden", TESTS / "data" / "quantized"
FAMILIES = ("llama", "qwen3", "gemma3", "glm_moe_dsa", "qwen3_5_moe")
DEFAULT = {
    ("llama", "fp8"),
    ("qwen3", "mxfp4"),
    ("gemma3", "int4"),
    ("glm_moe_dsa", "nvfp4"),
    ("qwen3_5_moe", "fp8"),
}
"""Every family and every kind; the other pairs are marked slow."""
KINDS = {"fp8": ScaledTensor, "int4": PackedTensor, "nvfp4": Fp4Tensor, "mxfp4": Fp4Tensor}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
numbers = jax.jit(formats.dequantize)
TOKENS = np.arange(3, 15)


def write(folder: Path, tensors: dict[str, np.ndarray], config: dict) -> Path:
    """A checkpoint directory."""
    header, data = {}, []
    at = 0
    for name, array in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        span = [at, at := at + len(raw)]
        header[name] = {"dtype": NAMES[array.dtype], "shape": array.shape, "data_offsets": span}
        data.append(raw)
    text = json.dumps(header).encode()
    folder.mkdir(exist_ok=True)
    blob = len(text).to_bytes(8, "little") + text + b"".join(data)
    (folder / "model.safetensors").write_bytes(blob)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def read(path: Path) -> dict[str, np.ndarray]:
    file = SafetensorsFile(path)
    return {name: file.read(name) for name in file.tensors}


def golden(family: str) -> tuple[dict[str, np.ndarray], dict]:
    config = json.loads((GOLDEN / family / "config.json").read_text())
    return read(GOLDEN / family / "model.safetensors"), config


def encoded(folder: Path, family: str, kind: str) -> Path:
    """The golden checkpoint with its linears as compressed-tensors has encoded them."""
    tensors, config = golden(family)
    file = SafetensorsFile(DATA / f"{family}-{kind}.safetensors")
    for name in json.loads(file.metadata["replaced"]):
        del tensors[name]
    tensors |= {name: file.read(name) for name in file.tensors}
    config["quantization_config"] = json.loads(file.metadata["quantization_config"])
    return write(folder, tensors, config)


def plain(folder: Path, path: Path) -> Path:
    """The same checkpoint with every quantized weight as float32 numbers."""
    checkpoint = open_checkpoint(path)
    mine = {t for s in checkpoint.quantized.values() for t in s.tensors} | checkpoint.unread
    tensors = {name: checkpoint.read(name) for name in checkpoint.names - mine}
    for name in checkpoint.quantized:
        node = jax.tree.map(jnp.asarray, checkpoint.weight(name))
        tensors[name] = np.asarray(numbers(node))
        if isinstance(node, Exl3Tensor):
            tensors[name] = tensors[name][:64, :64]  # the test's matrices without their padding
    config = {k: v for k, v in checkpoint.config.items() if k != "quantization_config"}
    return write(folder, tensors, config)


@pytest.fixture
def kept(monkeypatch) -> None:
    """Weights stay as they are, though the CPU has no kernel for them."""
    monkeypatch.setattr(load, "expand_where_needed", lambda platform: lambda leaf: False)


def logits(path: Path, ranks: int = 1) -> tuple[np.ndarray, Model]:
    model = Model.load(path, dtype="float32", ranks=ranks)
    return np.asarray(model.forward(TOKENS).logits), model


def nodes(params) -> list:
    leaves = jax.tree.leaves(params, is_leaf=formats.is_quantized)
    return [leaf for leaf in leaves if formats.is_quantized(leaf)]


def same(path: Path, folder: Path, ranks: int = 1) -> Model:
    out, model = logits(path, ranks)
    reference, _ = logits(plain(folder, path))
    relative, absolute = errors(out, reference)
    assert relative <= 1e-5 and absolute <= 1e-5 * np.abs(reference).max(), (relative, absolute)
    return model


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        pytest.param(f, k, marks=() if (f, k) in DEFAULT else pytest.mark.slow)
        for f in FAMILIES
        for k in KINDS
    ],
)
def test_encoded_goldens_compute_what_their_numbers_compute(tmp_path, kept, family, kind):
    path = encoded(tmp_path / "packed", family, kind)
    model = same(path, tmp_path / "plain")
    held = nodes(model.params)
    assert len(held) >= 7
    for node in held:
        inside = node.stacks if isinstance(node, Mixed) else (node,)
        assert any(isinstance(n, KINDS[kind]) for n in inside)
    stored = open_checkpoint(path).quantized
    assert {s.format for s in stored.values()} == {
        {"fp8": "FP8", "int4": "pack-quantized"}.get(kind, kind.upper())
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("family", "ranks"), [("llama", 3), pytest.param("glm_moe_dsa", 2, marks=pytest.mark.slow)]
)
def test_ranks_hold_shares(tmp_path, kept, family, ranks, kind):
    same(encoded(tmp_path / "packed", family, kind), tmp_path / "plain", ranks)


# --- Encoders for other writers' names -----------------------------------------------------------


def fp8_blocks(weight: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
    """[..., N, K] -> E4M3 and the scales of its blocks (partial at the edges)."""
    weight = weight.astype(np.float32)
    *lead, n, k = weight.shape
    fill = [(0, 0)] * len(lead) + [(0, -n % block), (0, -k % block)]
    grid = np.pad(np.abs(weight), fill)
    grid = grid.reshape(*lead, grid.shape[-2] // block, block, -1, block).max((-3, -1))
    scale = np.maximum(grid, 1e-6).astype(np.float32) / 448
    full = scale.repeat(block, -2).repeat(block, -1)[..., :n, :k]
    return (weight / full).astype(ml_dtypes.float8_e4m3fn), scale


def mxfp4(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[..., N, K] -> nibbles and E8M0 bytes; K is padded for the sake of the example's shapes."""
    weight = weight.astype(np.float32)
    grouped = weight.reshape(*weight.shape[:-1], -1, 32)
    power = np.ceil(np.log2(np.maximum(np.abs(grouped).max(-1), 1e-9) / 6))
    scaled = grouped / np.exp2(power)[..., None]
    codes = np.abs(scaled[..., None] - bits.E2M1).argmin(-1)
    return bits.pack_nibbles(codes.reshape(weight.shape)), (power + 127).astype(np.uint8)


def test_fused_fp8_experts(tmp_path, kept):
    """Transformers' names: `experts.gate_up_proj` and `experts.gate_up_proj_scale_inv`."""
    tensors, config = golden("qwen3_5_moe")
    for name in [n for n in tensors if ".experts." in n and "visual" not in n and "mtp" not in n]:
        weight, scale = fp8_blocks(tensors[name], 16)
        tensors[name], tensors[f"{name}_scale_inv"] = weight, scale
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    model = same(write(tmp_path / "packed", tensors, config), tmp_path / "plain")
    experts = [n for n in nodes(model.params) if n.ndim == 4]
    assert len(experts) == 3 and all(isinstance(n, ScaledTensor) for n in experts)


def test_layers_of_several_formats(tmp_path, kept):
    """FP8, MXFP4, one scale a tensor and BF16 in one parameter: each stays as it is."""
    tensors, config = golden("llama")
    for layer, kind in enumerate(["fp8", "mxfp4", "tensor"]):
        for name in ("q_proj", "k_proj", "v_proj"):
            stem = f"model.layers.{layer}.self_attn.{name}.weight"
            if kind == "fp8":
                tensors[stem], tensors[f"{stem}_scale_inv"] = fp8_blocks(tensors[stem], 32)
            elif kind == "mxfp4":
                tensors[stem], tensors[f"{stem}_scale"] = mxfp4(tensors[stem])
            else:
                weight, scale = fp8_blocks(tensors[stem], 512)
                tensors[stem], tensors[f"{stem}_scale"] = weight, scale.reshape(1)
                tensors[f"{stem.removesuffix('weight')}input_scale"] = np.ones((), np.float32)
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    path = write(tmp_path / "packed", tensors, config)
    model = same(path, tmp_path / "plain")
    mixed = [n for n in nodes(model.params) if isinstance(n, Mixed)]
    assert len(mixed) == 3 and {len(n.stacks) for n in mixed} == {4}
    same(path, tmp_path / "plain", ranks=2)


@pytest.mark.parametrize("ranks", [1, 2])
def test_awq_gptq_and_exl3_in_one_file(tmp_path, kept, ranks):
    """Told apart by their shapes; EXL3's padding to 128 is cropped."""
    tensors, config = golden("llama")
    rng = np.random.default_rng(0)

    def words(*shape: int) -> np.ndarray:
        return rng.integers(-(2**31), 2**31, shape).astype(np.int32)

    def scales(*shape: int) -> np.ndarray:
        return (rng.random(shape) * 0.02).astype(np.float16)

    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, kind in (("self_attn.q_proj", "awq"), ("self_attn.o_proj", "exl3"), ("mlp.up_proj", "gptq"), ("mlp.down_proj", "gptq")):
            x = f"{prefix}.{name}"
            n, k = tensors.pop(f"{x}.weight").shape
            if kind == "exl3":
                tensors[f"{x}.trellis"] = words(8, 8, 20).view(np.int16)
                tensors[f"{x}.suh"], tensors[f"{x}.svh"] = scales(128), scales(128) * 20
                tensors[f"{x}.mul1"] = np.array(0x83DCD12D, np.uint32).view(np.int32)
                continue
            across = (k, n // 8) if kind == "awq" else (k // 8, n)
            tensors[f"{x}.qweight"], tensors[f"{x}.qzeros"] = words(*across), words(k // 32, n // 8)
            tensors[f"{x}.scales"] = scales(k // 32, n)
            if name == "mlp.down_proj":
                tensors[f"{x}.g_idx"] = rng.permutation(np.arange(k) // 32).astype(np.int32)
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}
    path = write(tmp_path / "packed", tensors, config)
    assert {s.format for s in open_checkpoint(path).quantized.values()} == {"AWQ", "GPTQ", "EXL3"}
    model = same(path, tmp_path / "plain", ranks)
    assert len(nodes(model.params)) == 4


def test_the_twelve_bit_form_changes_no_bit(tmp_path):
    tensors, config = golden("qwen3")
    checkpoint = open_checkpoint(write(tmp_path / "packed", tensors, config))
    family = models.family_of(checkpoint.config)
    tree = family.declare(family.read_config(checkpoint.config), 1)
    before = load.load_params(tree, checkpoint)
    after = load.load_params(tree, checkpoint, twelve_bits=True)
    assert nodes(after)
    for a, b in zip(
        jax.tree.leaves(before), jax.tree.leaves(after, is_leaf=formats.is_quantized), strict=True
    ):
        out = formats.dequantize(b)
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(out))


def test_a_cpu_without_a_kernel_stores_numbers(tmp_path, caplog):
    path = encoded(tmp_path / "packed", "llama", "nvfp4")
    out, model = logits(path)
    assert not nodes(model.params)
    assert "stored as float32" in caplog.text
    relative, _ = errors(out, logits(plain(tmp_path / "plain", path))[0])
    assert relative <= 1e-6


# --- What is refused -----------------------------------------------------------------------------


def broken(tmp_path: Path, change) -> str:
    tensors, config = golden("llama")
    stem = "model.layers.1.mlp.up_proj"
    tensors[f"{stem}.weight"], tensors[f"{stem}.weight_scale"] = mxfp4(tensors[f"{stem}.weight"])
    change(tensors, stem)
    with pytest.raises(CheckpointError) as caught:
        Model.load(write(tmp_path / "packed", tensors, config), dtype="float32")
    return str(caught.value)


def test_a_scale_of_ff_is_refused(tmp_path):
    def change(tensors, stem):
        tensors[f"{stem}.weight_scale"][3, 1] = 0xFF

    message = broken(tmp_path, change)
    assert "model.layers.1.mlp.up_proj.weight_scale" in message and "[3, 1]" in message


def test_a_nan_scale_is_refused(tmp_path):
    def change(tensors, stem):
        tensors[f"{stem}.weight"] = np.zeros((160, 64), np.int8)
        tensors[f"{stem}.weight_scale"] = np.full((160, 1), np.nan, np.float32)

    assert "model.layers.1.mlp.up_proj.weight_scale" in broken(tmp_path, change)


@pytest.mark.parametrize("leave", [True, False])
def test_missing_and_leftover_scales_are_named(tmp_path, leave):
    def change(tensors, stem):
        if leave:
            tensors[f"{stem}.weight"] = np.zeros((160, 64), np.float32)
        else:
            del tensors[f"{stem}.weight_scale"]

    message = broken(tmp_path, change)
    if leave:
        assert "unexpected" in message and "up_proj.weight_scale" in message
    else:
        assert "up_proj.weight'" in message and "uint8 [160, 32]" in message
