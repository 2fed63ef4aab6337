"""Broken and hostile checkpoints: one clear error that names the file and, where there is one, the
tensor; never a crash, a wait or a large allocation."""

from __future__ import annotations

import copy
import json
import os
import random
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from sparkjax.models.params import Dim, Param
from sparkjax.weights import load
from sparkjax.weights.checkpoint import INDEX, open_checkpoint
from sparkjax.weights.errors import CheckpointError
from sparkjax.weights.safetensors import DTYPES

NAMES = {dtype: name for name, dtype in DTYPES.items()}
SINGLE = "model.safetensors"
E4M3 = ml_dtypes.float8_e4m3fn
MOST = 32 << 20
"""Bytes that a load of these tiny files may allocate at a time."""


def tensors() -> dict[str, np.ndarray]:
    """A norm and four weights, each in another format."""
    rng = np.random.default_rng(0)
    return {
        "norm.weight": rng.standard_normal(64).astype(np.float32),
        "dense.weight": rng.standard_normal((32, 64)).astype(ml_dtypes.bfloat16),
        "fp8.weight": rng.standard_normal((32, 64)).astype(E4M3),
        "fp8.weight_scale_inv": rng.random((2, 4)).astype(np.float32),
        "mx.weight": rng.integers(0, 256, (32, 32), dtype=np.uint8),
        "mx.weight_scale": rng.integers(100, 140, (32, 2), dtype=np.uint8),
        "nv.weight_packed": rng.integers(0, 256, (32, 32), dtype=np.uint8),
        "nv.weight_scale": rng.random((32, 4)).astype(E4M3),
        "nv.weight_global_scale": np.ones(1, np.float32),
    }


CONFIG = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 16]}}


def tree() -> dict[str, Any]:
    matrix = (Dim(32), Dim(64))
    return {
        "norm": Param("norm.weight", (Dim(64),), dtype="float32"),
        **{name: Param(f"{name}.weight", matrix) for name in ("dense", "fp8", "mx", "nv")},
    }


def parts(arrays: dict[str, np.ndarray]) -> tuple[dict[str, Any], bytes]:
    """Header and data."""
    header: dict[str, Any] = {}
    data = b""
    for name, array in arrays.items():
        raw = np.ascontiguousarray(array).tobytes()
        span = [len(data), len(data) + len(raw)]
        header[name] = {
            "dtype": NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": span,
        }
        data += raw
    return header, data


def joined(header: Any, data: bytes, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


WHOLE = joined(*parts(tensors()))


def put(folder: Path, raw: bytes, config: Any = CONFIG) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / SINGLE).write_bytes(raw)
    text = config if isinstance(config, bytes) else json.dumps(config).encode()
    (folder / "config.json").write_bytes(text)
    return folder


def attempt(folder: Path) -> str | None:
    """Loads; the error's message, or None. Anything but a CheckpointError fails the test."""
    tracemalloc.start()
    try:
        load.load_params(tree(), open_checkpoint(folder))
        return None
    except CheckpointError as error:
        return str(error)
    finally:
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert most < MOST, most


def refused(folder: Path, *words: str) -> str:
    message = attempt(folder)
    assert message is not None, "it was loaded"
    assert str(folder) in message, message
    assert len(message) < 2000 and "\n" not in message
    for word in words:
        assert word in message, message
    return message


def test_the_whole_one_loads(tmp_path):
    assert attempt(put(tmp_path / "x", WHOLE)) is None


# --- The file as bytes ----------------------------------------------------------------------------

LENGTHS = sorted({*range(0, 12), *random.Random(1).sample(range(len(WHOLE)), 60), len(WHOLE) - 1})


def test_a_file_cut_off_anywhere(tmp_path):
    """72 lengths."""
    folder = put(tmp_path / "x", WHOLE)
    assert len(LENGTHS) >= 70
    for length in LENGTHS:
        (folder / SINGLE).write_bytes(WHOLE[:length])
        refused(folder, SINGLE)


def test_a_flipped_byte_anywhere_in_the_header(tmp_path):
    """500 of them: still the same tensors, or an error."""
    folder = put(tmp_path / "x", WHOLE)
    length = int.from_bytes(WHOLE[:8], "little")
    rng = random.Random(2)
    refusals = 0
    for at in rng.choices(range(8 + length), k=500):
        raw = bytearray(WHOLE)
        raw[at] ^= 1 << rng.randrange(8)
        (folder / SINGLE).write_bytes(raw)
        if attempt(folder) is not None:
            refused(folder)
            refusals += 1
    assert refusals > 300


@pytest.mark.parametrize("length", [0, 1, 7, 2**20, 2**32, 2**62, 2**63, 2**64 - 1])
def test_a_header_length_that_lies(tmp_path, length):
    header, data = parts(tensors())
    refused(put(tmp_path / "x", joined(header, data, length)), SINGLE)


@pytest.mark.parametrize(
    "header",
    [
        b"", b"{", b"[]", b"null", b"1", b'"x"', b"{]", b"\xff\xfe{}", b"{\"a\": NaN}", b"{}x",
        b'{"a":' * 100_000, b"[" * 200_000, b'{"a": ' + b"9" * 100_000 + b"}",
        b'{"a": {}, "a": {}}', b"\x00" * 50,
    ],
    ids=range(15),
)  # fmt: skip
def test_a_header_that_is_no_header(tmp_path, header):
    refused(put(tmp_path / "x", joined(header, b"\0" * 64)), SINGLE)


def test_an_empty_header_misses_everything(tmp_path):
    refused(put(tmp_path / "x", joined({}, b"")), "missing tensors", "dense.weight")


def test_a_name_twice(tmp_path):
    header, data = parts(tensors())
    text = json.dumps(header).encode()[:-1] + b', "dense.weight": {}}'
    refused(put(tmp_path / "x", joined(text, data)), SINGLE, "'dense.weight' occurs twice")


@pytest.mark.parametrize("metadata", [[], 1, "x", {"a": 1}, {"a": {}}, [1]])
def test_metadata_that_is_none(tmp_path, metadata):
    header, data = parts(tensors())
    folder = put(tmp_path / "x", joined({"__metadata__": metadata, **header}, data))
    if metadata:
        refused(folder, SINGLE, "__metadata__")
    else:
        assert attempt(folder) is None


# --- One field of one tensor ----------------------------------------------------------------------

WEIRD: list[Any] = [
    None, True, -1, 0.5, 1e300, 2**48, 2**70, "", "x", "F32\0", [], {}, [[]], [None], [-1, 5],
    [5, 1], [0], [0, 1, 2], [0.0, 8.0], ["0", "8"], [0, 2**63], [True, 8], [1] * 1000, {"a": 1},
]  # fmt: skip


@pytest.mark.parametrize("field", ["dtype", "shape", "data_offsets", "entry"])
def test_fields_of_any_kind(tmp_path, field):
    """24 values for each of three tensors: 288 files."""
    header, data = parts(tensors())
    folder = put(tmp_path / "x", WHOLE)
    for name in ("dense.weight", "fp8.weight_scale_inv", "nv.weight_global_scale"):
        for value in WEIRD:
            if field == "shape" and value == [] and name.endswith("global_scale"):
                continue  # one number, as other writers store it
            broken = copy.deepcopy(header)
            if field == "entry":
                broken[name] = value
            else:
                broken[name][field] = value
            (folder / SINGLE).write_bytes(joined(broken, data))
            refused(folder, name)


@pytest.mark.parametrize("field", ["dtype", "shape", "data_offsets"])
def test_fields_that_are_missing(tmp_path, field):
    header, data = parts(tensors())
    del header["mx.weight"][field]
    refused(put(tmp_path / "x", joined(header, data)), SINGLE, "'mx.weight'")


@pytest.mark.parametrize("shift", [-1, 1, 64, 10_000, -64])
@pytest.mark.parametrize("name", list(tensors()))
def test_data_that_lies_elsewhere(tmp_path, name, shift):
    """Overlapping its neighbour, or outside of the file."""
    header, data = parts(tensors())
    header[name]["data_offsets"] = [o + shift for o in header[name]["data_offsets"]]
    message = refused(put(tmp_path / "x", joined(header, data)), SINGLE, name)
    assert "overlap" in message or "data_offsets" in message


@pytest.mark.parametrize("name", [n for n in tensors() if n != "norm.weight"])
@pytest.mark.parametrize("dtype", ["F64", "I64", "U8", "BOOL", "F8_E5M2", "I32"])
def test_another_dtype_of_as_many_bytes(tmp_path, name, dtype):
    """A dtype that a format does not have, with a shape that fits the bytes: refused by name, or
    (plain numbers of any width) loaded as what they are."""
    header, data = parts(tensors())
    entry = header[name]
    if entry["dtype"] == dtype:
        return
    ratio = DTYPES[entry["dtype"]].itemsize / DTYPES[dtype].itemsize
    count = entry["shape"][-1] * ratio
    if count != int(count) or not count:
        return
    entry["dtype"], entry["shape"][-1] = dtype, int(count)
    message = attempt(put(tmp_path / "x", joined(header, data)))
    assert message is None or name.split(".")[0] in message


@pytest.mark.parametrize("name", list(tensors()))
def test_a_tensor_that_is_not_there(tmp_path, name):
    arrays = tensors()
    del arrays[name]
    refused(put(tmp_path / "x", joined(*parts(arrays))), name.split(".")[0])


@pytest.mark.parametrize("name", ["extra.weight", "dense.bias", "../x", "", "fp8.weight_scale_inv2"])
def test_a_tensor_too_many(tmp_path, name):
    arrays = {**tensors(), name: np.zeros(4, np.float32)}
    refused(put(tmp_path / "x", joined(*parts(arrays))), "unexpected tensor")


@pytest.mark.parametrize("name", list(tensors()))
@pytest.mark.parametrize("change", ["longer", "turned", "flat"])
def test_another_shape(tmp_path, name, change):
    arrays = tensors()
    array = arrays[name]
    if change == "longer":
        arrays[name] = np.concatenate([array, array])
    elif change == "turned":
        arrays[name] = array.T
    else:
        arrays[name] = array.reshape(-1)
    message = attempt(put(tmp_path / "x", joined(*parts(arrays))))
    same = arrays[name].shape == array.shape or (name in ("dense.weight",) and change != "longer")
    if not same and message is not None:
        assert name.split(".")[0] in message
    # More scales than the config's blocks need are read as those of smaller blocks.
    assert message is not None or change != "longer" or name == "fp8.weight_scale_inv"


# --- Numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fp8.weight_scale_inv", np.nan), ("fp8.weight_scale_inv", np.inf),
        ("fp8.weight_scale_inv", -np.inf), ("mx.weight_scale", 0xFF), ("nv.weight_scale", np.nan),
        ("nv.weight_global_scale", np.nan), ("nv.weight_global_scale", np.inf),
    ],
)  # fmt: skip
@pytest.mark.parametrize("at", [0, -1])
def test_a_scale_that_is_no_number(tmp_path, name, value, at):
    arrays = tensors()
    flat = arrays[name].reshape(-1)
    flat[at] = value
    message = refused(put(tmp_path / "x", joined(*parts(arrays))), repr(name), "not a number")
    index = [int(i) for i in np.unravel_index(at % flat.size, arrays[name].shape)]
    assert str(index) in message


def test_a_divisor_of_zero(tmp_path):
    arrays = {**tensors(), "nv.weight_global_scale": np.zeros(1, np.float32)}
    refused(put(tmp_path / "x", joined(*parts(arrays))), "nv.weight_global_scale", "zero")


# --- The folder -----------------------------------------------------------------------------------


def sharded(folder: Path, weight_map: Any = None, text: bytes | None = None) -> Path:
    """Two files and an index."""
    arrays = tensors()
    names = list(arrays)
    where = {n: "a.safetensors" if i < 4 else "b.safetensors" for i, n in enumerate(names)}
    put(folder, WHOLE)
    (folder / SINGLE).unlink()
    for file in ("a.safetensors", "b.safetensors"):
        mine = {n: a for n, a in arrays.items() if where[n] == file}
        (folder / file).write_bytes(joined(*parts(mine)))
    index = text or json.dumps({"weight_map": weight_map or where}).encode()
    (folder / INDEX).write_bytes(index)
    return folder


def test_two_files_load(tmp_path):
    assert attempt(sharded(tmp_path / "x")) is None


def test_a_missing_shard_is_named(tmp_path):
    folder = sharded(tmp_path / "x")
    (folder / "b.safetensors").unlink()
    refused(folder, "missing files: b.safetensors")


def test_a_tensor_in_another_shard(tmp_path):
    where = dict.fromkeys(tensors(), "a.safetensors")
    refused(sharded(tmp_path / "x", where), "a.safetensors", "'mx.weight'")


@pytest.mark.parametrize(
    "name",
    ["../a.safetensors", "/etc/passwd", "", ".", "..", "x/../a.safetensors", "a\0", None, 1, [], {}],
)
def test_a_shard_that_is_no_plain_name(tmp_path, name):
    where = {**dict.fromkeys(tensors(), "a.safetensors"), "mx.weight": name}
    refused(sharded(tmp_path / "x", where), INDEX, "'mx.weight'")


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"{}", b'{"weight_map": []}', b'{"weight_map": {}}', b'{"weight_map": 1}',
     b"[" * 200_000, b'{"weight_map": {"a": "b", "a": "c"}}', b'{"weight_map": null}', b"\xff"],
    ids=range(11),
)  # fmt: skip
def test_an_index_that_is_none(tmp_path, text):
    refused(sharded(tmp_path / "x", text=text or b" "), INDEX)


@pytest.mark.parametrize("file", [SINGLE, "a.safetensors"])
def test_a_link_out_of_the_folder(tmp_path, file):
    outside = tmp_path / "secret.safetensors"
    outside.write_bytes(WHOLE)
    folder = put(tmp_path / "x", WHOLE) if file == SINGLE else sharded(tmp_path / "x")
    (folder / file).unlink()
    (folder / file).symlink_to(outside)
    refused(folder, file, "leads out of the folder")
    (folder / file).unlink()
    (folder / file).symlink_to("../secret.safetensors")
    refused(folder, file, "leads out of the folder")


def test_links_within_and_of_the_hubs_cache_are_fine(tmp_path):
    home = tmp_path / "models--a--b"
    folder = home / "snapshots" / "abc"
    (home / "blobs").mkdir(parents=True)
    folder.mkdir(parents=True)
    put(folder, WHOLE)
    (folder / SINGLE).rename(home / "blobs" / "123")
    (folder / SINGLE).symlink_to("../../blobs/123")
    assert attempt(folder) is None
    other = put(tmp_path / "x", WHOLE)
    (other / SINGLE).rename(other / "real")
    (other / SINGLE).symlink_to("real")
    assert attempt(other) is None


@pytest.mark.parametrize("kind", ["directory", "pipe", "dangling", "circle", "empty", "closed"])
def test_what_is_no_file(tmp_path, kind):
    folder = put(tmp_path / "x", WHOLE)
    file = folder / SINGLE
    file.unlink()
    if kind == "directory":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "dangling":
        file.symlink_to("nowhere")
    elif kind == "circle":
        file.symlink_to(SINGLE)
    elif kind == "empty":
        file.write_bytes(b"")
    else:
        file.write_bytes(WHOLE)
        file.chmod(0)
        if os.geteuid() == 0:
            return  # reads everything
    refused(folder, SINGLE)


CONFIGS: list[Any] = [
    b"", b"{", b"[]", b"1", b"[" * 200_000, b'{"a": 1, "a": 2}', b"\xff\xfe",
]  # fmt: skip
SECTIONS: list[Any] = [
    [], 1, "x", {"quant_method": []}, {"weight_block_size": [0, 0]}, {"weight_block_size": "x"},
    {"weight_block_size": [-1, 1]}, {"weight_block_size": [1e9, 1]}, {"config_groups": []},
    {"config_groups": {"a": 1}}, {"config_groups": {"a": {"weights": []}}}, {"dynamic": [1]},
    {"extra_config": {"(": 1}}, {"sparsity_config": []}, {"bits": "x", "group_size": {}},
]  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS, ids=range(len(CONFIGS)))
def test_a_config_that_is_none(tmp_path, config):
    refused(put(tmp_path / "x", WHOLE, config), "config.json")


@pytest.mark.parametrize("section", SECTIONS, ids=range(len(SECTIONS)))
def test_a_quantization_section_of_any_kind(tmp_path, section):
    message = attempt(put(tmp_path / "x", WHOLE, {"quantization_config": section}))
    assert message is None or str(tmp_path) in message
