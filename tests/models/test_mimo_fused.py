"""MiMo's fused projections: rows in the checkpoint's slices, plain and under FP8 blocks."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from driver import GOLDEN
from safetensors.numpy import save_file

from sparkjax.manifests import read_manifest
from sparkjax.mesh.context import Context
from sparkjax.model import Model
from sparkjax.models import mimo_v2, mimo_v2_flash, params
from sparkjax.models.config import UnsupportedConfig
from sparkjax.weights import formats
from sparkjax.weights.checkpoint import open_checkpoint
from sparkjax.weights.load import load_params
from sparkjax.weights.safetensors import SafetensorsFile

SOURCE = GOLDEN / "mimo_v2"
FUSED = "qkv_proj.weight"
MANIFESTS = Path(__file__).parent.parent.parent / "checkpoints"


def values(drop=(), **changes):
    found = json.loads((SOURCE / "config.json").read_text())
    return {k: v for k, v in found.items() if k not in drop} | changes


def tensors():
    file = SafetensorsFile(SOURCE / "model.safetensors")
    return {name: np.asarray(file.read(name)) for name in file.tensors}


def write(folder, arrays, shards, **changes):
    folder.mkdir()
    save_file({k: np.ascontiguousarray(v) for k, v in arrays.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(values(**changes)))
    index = {
        "metadata": {"tp_size": shards},
        "weight_map": dict.fromkeys(arrays, "model.safetensors"),
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def attention(folder, ranks=1):
    """Queries, keys and values of all layers as numbers, by path."""
    checkpoint = open_checkpoint(folder)
    config = mimo_v2.read_config(checkpoint.config)
    tree = mimo_v2.declare(config, ranks) | {"draft": mimo_v2.declare_draft(config, ranks)}
    found = params.leaves_of(load_params(tree, checkpoint))
    return {
        path: np.asarray(formats.dequantize(leaf))
        for path, leaf in found
        if path.rpartition(".")[2] in ("q", "k", "v")
    }


def regroup(arrays, shards):
    """The golden's fused tensors (two slices) as `shards` slices, and as separate projections."""
    config = mimo_v2.read_config(values(checkpoint_shards=2))
    fused, split = dict(arrays), dict(arrays)
    for name in [n for n in arrays if n.endswith(FUSED)]:
        layer = int(name.split(".layers.")[1].split(".")[0])
        kind = "sliding_attention" if ".mtp." in name else config.mixers[layer]
        shares = [rows // 2 for rows in mimo_v2_flash._rows(config, kind)]
        halves = [np.split(half, np.cumsum(shares)[:-1]) for half in np.split(fused.pop(name), 2)]
        whole = [np.concatenate(parts) for parts in zip(*halves, strict=True)]
        slices = zip(*(np.split(part, shards) for part in whole), strict=True)
        fused[name] = np.concatenate([part for one in slices for part in one])
        del split[name]
        for letter, part in zip("qkv", whole, strict=True):
            split[name.replace("qkv_proj", f"{letter}_proj")] = part
    return fused, split


def test_any_number_of_slices_gives_the_same_projections(tmp_path):
    one, split = regroup(tensors(), 1)
    reference = attention(SOURCE)
    assert len(reference) == 9
    folders = [
        write(tmp_path / "one", one, 1),
        write(tmp_path / "quoted", tensors(), "2"),
        write(tmp_path / "split", split, 2, model_type="mimo_v2_flash"),
    ]
    for folder in folders:
        found = attention(folder)
        assert found.keys() == reference.keys()
        assert all(np.array_equal(found[path], reference[path]) for path in reference)


def fp8(w, shards, block):
    """(codes, scales, the numbers that they stand for): every slice has a grid of its own."""
    codes, grids, numbers = [], [], []
    for at, part in enumerate(np.split(w.astype(np.float32), shards)):
        n, k = part.shape
        grid = np.zeros((-(-n // block[0]), -(-k // block[1])), np.float32)
        row, col = np.arange(n) // block[0], np.arange(k) // block[1]
        for i, j in np.ndindex(grid.shape):
            # No two alike, so that a wrong one shows.
            grid[i, j] = np.abs(part[row == i][:, col == j]).max() / 448 * (1 + 0.3 * i + at)
        full = grid[row][:, col]
        codes.append((part / full).astype(ml_dtypes.float8_e4m3fn))
        grids.append(grid)
        numbers.append(codes[-1].astype(np.float32) * full)
    return np.concatenate(codes), np.concatenate(grids), np.concatenate(numbers)


@pytest.mark.parametrize(
    ("ranks", "block"), [(1, (32, 16)), (1, (46, 64)), (3, (128, 128)), (3, (46, 64))]
)
def test_fp8_blocks_end_with_their_slice(tmp_path, block, ranks):
    packed, plain = tensors(), tensors()
    for name in [n for n in packed if n.endswith(FUSED)]:
        packed[name], packed[f"{name}_scale_inv"], plain[name] = fp8(packed[name], 2, block)
    quantization = {"quant_method": "fp8", "weight_block_size": list(block)}
    found = attention(write(tmp_path / "fp8", packed, 2, quantization_config=quantization), ranks)
    expected = attention(write(tmp_path / "plain", plain, 2), ranks)
    for path, reference in expected.items():
        np.testing.assert_allclose(found[path], reference, rtol=1e-6, err_msg=path)


def test_the_release_reads_its_layout():
    manifest = read_manifest(MANIFESTS / "mimo-v2.6-flash.yaml")
    config = mimo_v2.read_config(manifest.config)
    assert config.of("full_attention") == (0, *range(5, 48, 6))
    assert config.shards == 4 and config.drafts == 3 and config.value_scale == 0.707
    assert (config.full.rope.dim, config.full.rope.theta) == (64, 1e7)
    assert (config.sliding.rope.dim, config.sliding.rope.theta) == (64, 1e4)
    assert (config.full.kv_heads, config.sliding.kv_heads, config.sliding.window) == (4, 8, 129)
    assert config.sliding.sinks and not config.full.sinks
    q = mimo_v2.declare(config, 1)["layers"]["full_attention"]["q"]
    (part,) = q.also
    # 16 heads of queries, one of keys, one of values a slice.
    assert part.ranges == tuple((i * 3392, i * 3392 + 3072) for i in range(4))


def test_windows_count_as_their_spelling_says():
    def window(**changes):
        return mimo_v2.read_config(values(("sliding_window", "sliding_window_size"), **changes)
                                   | {"checkpoint_shards": 2}).sliding.window  # fmt: skip

    assert window(sliding_window=128) == 128
    assert window(sliding_window_size=128) == 129
    assert window(sliding_window=128, sliding_window_size=128) == 129


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("checkpoint_shards", {"checkpoint_shards": 3}),
        ("checkpoint_shards", {}),
        ("attention_projection_layout", {"attention_projection_layout": "fused_kv"}),
        ("hybrid_layer_pattern", {"hybrid_layer_pattern": [0, 1]}),
        ("moe_layer_freq", {"moe_layer_freq": [0, 2, 1, 1, 1]}),
        ("scoring_func", {"scoring_func": "softmax"}),
        ("hidden_act", {"hidden_act": "gelu"}),
        ("n_shared_experts", {"n_shared_experts": 1}),
        ("rope_scaling", {"rope_scaling": {"type": "yarn", "factor": 4.0}}),
    ],
)
def test_refusals_name_the_field(field, changes):
    # Without a number of slices it is 4, which does not divide two key heads.
    with pytest.raises(UnsupportedConfig, match=field):
        mimo_v2.read_config(values(**changes))


def test_fp8_projections_compute(tmp_path):
    packed = tensors()
    for name in [n for n in packed if n.endswith(FUSED)]:
        packed[name], packed[f"{name}_scale_inv"], _ = fp8(packed[name], 2, (128, 128))
    folder = write(tmp_path / "fp8", packed, 2, quantization_config={"quant_method": "fp8"})
    tokens = np.arange(20) * 7 % 384
    plain = Model.load(SOURCE, context=Context()).forward(tokens).logits
    out = Model.load(folder, context=Context()).forward(tokens).logits
    assert np.corrcoef(out.reshape(-1), plain.reshape(-1))[0, 1] > 0.9
