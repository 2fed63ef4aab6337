"""GGUF blocks against the `gguf` library: kept vectors, random blocks, and wrong decoders."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from sparkjax.weights import formats
from sparkjax.weights.errors import CheckpointError
from sparkjax.weights.formats import gguf as blocks
from sparkjax.weights.formats.gguf import KINDS, GGUFTensor, gguf_tensor

DATA = Path(__file__).parents[1] / "data" / "gguf"
CASES = json.loads((DATA / "vectors.json").read_text())["cases"]
VECTORS = load_file(DATA / "vectors.safetensors")
TINY_NORMAL = np.finfo(np.float32).tiny


def equal(got, expected) -> bool:
    """Bit-equal but for -0, NaN payloads, and float32 subnormals, which XLA flushes."""
    expected = np.where(np.abs(expected) < TINY_NORMAL, 0, expected)
    got = np.where(np.abs(got) < TINY_NORMAL, 0, got)
    return np.array_equal(got, expected, equal_nan=True)


def random_blocks(kind: str, rows: int = 6, per_row: int = 3) -> np.ndarray:
    rng = np.random.default_rng(sum(kind.encode()))
    return rng.integers(0, 256, (rows, per_row * KINDS[kind].nbytes), dtype=np.uint8)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["name"])
def test_kept_vectors(case):
    t = gguf_tensor(jnp.asarray(VECTORS[case["data"]]), case["kind"])
    assert list(t.shape) == case["shape"]
    assert equal(np.asarray(formats.dequantize(t)), VECTORS[case["expected"]])


def test_the_vectors_cover_every_kind():
    assert {c["kind"] for c in CASES} == set(KINDS)


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_random_blocks_equal_the_library(kind, jit):
    raw = random_blocks(kind)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    run = jax.jit(formats.dequantize) if jit else formats.dequantize
    got = run(gguf_tensor(jnp.asarray(raw), kind))
    assert got.dtype == jnp.float32
    assert equal(np.asarray(got), expected)


@pytest.mark.parametrize(
    "kind",
    [k if k in ("Q4_1", "Q4_K", "MXFP4") else pytest.param(k, marks=pytest.mark.slow) for k in KINDS],
)
def test_layers_rows_and_dtypes(kind):
    raw = random_blocks(kind, rows=10).reshape(2, 5, -1)
    stacked = gguf_tensor(jnp.asarray(raw), kind)
    whole = np.asarray(formats.dequantize(stacked))
    assert stacked.ndim == 3 and whole.shape == formats.logical_shape(stacked)
    layer = jax.jit(formats.dequantize)(stacked, jnp.int32(1))
    np.testing.assert_array_equal(np.asarray(layer), whole[1])
    ids = jnp.array([[4, 0], [0, 2]])
    rows = formats.take_rows(gguf_tensor(jnp.asarray(raw[1]), kind), ids)
    np.testing.assert_array_equal(np.asarray(rows), whole[1][np.asarray(ids)])
    half = formats.dequantize(stacked, 0, jnp.bfloat16)
    assert half.dtype == jnp.bfloat16
    assert equal(np.asarray(half, np.float32), whole[0].astype(jnp.bfloat16).astype(np.float32))


def test_dense_arrays_pass_the_same_door():
    dense = jnp.arange(12, dtype=jnp.bfloat16).reshape(2, 2, 3)
    assert not formats.is_quantized(dense)
    assert formats.logical_shape(dense) == (2, 2, 3)
    assert formats.dequantize(dense).dtype == jnp.float32
    np.testing.assert_array_equal(formats.dequantize(dense, 1), np.arange(6.0, 12).reshape(2, 3))
    np.testing.assert_array_equal(formats.take_rows(dense[1], jnp.array([1])), [[9, 10, 11]])


def test_a_pytree_node():
    t = gguf_tensor(jnp.zeros((2, 3, 20), jnp.uint8), "Q4_1")
    assert formats.is_quantized(t) and t.dtype == jnp.float32
    leaves, tree = jax.tree.flatten(t)
    assert len(leaves) == 1 and leaves[0].shape == (2, 3, 20)
    again = jax.tree.unflatten(tree, leaves)
    assert isinstance(again, GGUFTensor) and again.kind == "Q4_1"


@pytest.mark.parametrize(
    ("array", "kind", "message"),
    [
        (np.zeros((2, 18), np.uint8), "IQ1_S", "IQ1_S.*Q4_0"),
        (np.zeros((2, 18), np.int8), "Q4_0", "int8.*uint8"),
        (np.zeros((2, 19), np.uint8), "Q4_0", "multiple of 18"),
    ],
)
def test_refusals(array, kind, message):
    with pytest.raises(CheckpointError, match=message):
        gguf_tensor(jnp.asarray(array), kind)


# Wrong readings that other implementations have had. The vectors must tell each of them apart.


def interleaved(b, width, run):
    """Neighbouring codes in one byte, as safetensors formats pack them."""
    shifts = jnp.arange(0, 8, width)
    codes = (b[..., None].astype(jnp.int32) >> shifts) & ((1 << width) - 1)
    return codes.reshape(*b.shape[:-1], -1)


def high_first(b, width, run):
    *lead, n = b.shape
    shifts = jnp.arange(0, 8, width)[::-1, None]
    codes = (b.reshape(*lead, n // run, 1, run).astype(jnp.int32) >> shifts) & ((1 << width) - 1)
    return codes.reshape(*lead, -1)


def whole_run(b, width, run):
    """All low codes of the block first."""
    return ORIGINAL["_fields"](b, width, b.shape[-1])


def swapped_half(b):
    return ORIGINAL["_half"](b[..., ::-1])


def plain_k_scales(scales):
    scale, low = ORIGINAL["_k_scales"](scales)
    return low, scale


def unsigned_bytes(b):
    return b


ORIGINAL = {n: getattr(blocks, n) for n in ("_fields", "_half", "_k_scales", "_int8", "_high_bits")}
PACKED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
PACKED += ("IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4")
WRONG = [
    *(("_fields", interleaved, k) for k in PACKED),
    *(("_fields", high_first, k) for k in PACKED),
    *(("_fields", whole_run, k) for k in ("Q2_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "NVFP4")),
    *(("_half", swapped_half, k) for k in KINDS if k not in ("MXFP4", "NVFP4")),
    *(("_k_scales", plain_k_scales, k) for k in ("Q4_K", "Q5_K")),
    *(("_int8", unsigned_bytes, k) for k in ("Q8_0", "Q6_K")),
    *(("_high_bits", lambda qh: jnp.int32(0), k) for k in ("Q5_0", "Q5_1")),
]


@pytest.mark.parametrize(("name", "wrong", "kind"), WRONG)
def test_wrong_decoders_are_caught(monkeypatch, name, wrong, kind):
    monkeypatch.setattr(blocks, name, wrong)
    cases = [c for c in CASES if c["kind"] == kind]
    tensors = [gguf_tensor(jnp.asarray(VECTORS[c["data"]]), kind) for c in cases]
    assert not all(
        equal(np.asarray(formats.dequantize(t)), VECTORS[c["expected"]])
        for t, c in zip(tensors, cases, strict=True)
    )
