"""Weights read straight into a rank's arrays: the same bytes as the file, and only those needed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkjax.mesh import spmd
from sparkjax.mesh.units import take
from sparkjax.models import params as declarations
from sparkjax.models.registry import family_of
from sparkjax.weights import direct, formats, load, stream
from sparkjax.weights.checkpoint import open_checkpoint
from sparkjax.weights.errors import CheckpointError
from sparkjax.weights.safetensors import SafetensorsFile

TESTS = Path(__file__).parents[1]
GOLDEN, DATA = TESTS / "golden", TESTS / "data" / "quantized"


def encoded(folder: Path, family: str, kind: str) -> Path:
    """A golden checkpoint whose linears are those of tests/data/quantized, in two files."""
    config = json.loads((GOLDEN / family / "config.json").read_text())
    file = SafetensorsFile(DATA / f"{family}-{kind}.safetensors")
    config["quantization_config"] = json.loads(file.metadata["quantization_config"])
    golden = SafetensorsFile(GOLDEN / family / "model.safetensors")
    gone = set(json.loads(file.metadata["replaced"]))
    where = {n: "a.safetensors" for n in golden.tensors if n not in gone}
    where |= dict.fromkeys(file.tensors, "b.safetensors")
    folder.mkdir()
    rest = {n: golden.read(n) for n in golden.tensors if n not in gone}
    save(folder / "a.safetensors", rest)
    (folder / "b.safetensors").write_bytes(bytes(file.bytes))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def save(path: Path, tensors: dict[str, np.ndarray]) -> None:
    from safetensors.numpy import save_file

    save_file({name: np.ascontiguousarray(a) for name, a in tensors.items()}, path)


def opened(path: Path, ranks: int):
    checkpoint = open_checkpoint(path)
    family = family_of(checkpoint.config)
    config = family.read_config(checkpoint.config)
    ignored = (*getattr(family, "IGNORED", ()), "model.layers.4.", "mtp.")
    return checkpoint, lambda n=ranks: family.declare(config, n), ignored


def loaded(path: Path, ranks: int = 1, **options):
    checkpoint, declare, ignored = opened(path, ranks)
    return load.load_params(declare(), checkpoint, ranks=ranks, ignored=ignored, **options)


def flat(params) -> dict:
    return dict(declarations.leaves_of(params))


@jax.jit
def dequantized(leaf):
    return formats.dequantize(leaf)


def host(leaf):
    return jax.tree.map(np.asarray, leaf)


def numbers(leaf) -> np.ndarray:
    """float32 of a parameter, on one device."""
    return np.asarray(dequantized(host(leaf)) if formats.is_quantized(leaf) else leaf, np.float32)


def equal(a, b) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize(
    ("family", "kind", "ranks"),
    [("llama", "fp8", 4), ("llama", "int4", 2), ("llama", "nvfp4", 3), ("qwen3_5_moe", "mxfp4", 2)],
)
def test_a_rank_holds_its_share_of_the_numbers(tmp_path, family, kind, ranks):
    """Against the dequantized whole, laid out by the declarations; and the parts of a mesh's
    arrays are the same bits."""
    path = encoded(tmp_path / "checkpoint", family, kind)
    _, declare, _ = opened(path, ranks)
    whole = flat(loaded(path))
    together = flat(loaded(path, ranks, mesh=spmd.make_mesh(ranks)))
    for name, param in declarations.leaves(declare()):
        expected = numbers(whole[name])
        for axis, dim in enumerate(param.dims):
            if dim.units is not None:
                expected = take(expected, axis - len(param.dims), dim.units.gather())
        np.testing.assert_array_equal(numbers(together[name]), expected, name)
    specs = dict(declarations.leaves_of(declarations.specs(declare(), ranks)))
    for rank in range(ranks):
        for name, mine in flat(loaded(path, ranks, rank=rank)).items():
            equal(mine, spmd.share_of(host(together[name]), specs[name], rank, ranks))


def test_computed_planes_and_devices_give_the_same(tmp_path, monkeypatch):
    path = encoded(tmp_path / "checkpoint", "llama", "int4")
    expected = loaded(path, 3, rank=2)
    monkeypatch.setattr(stream, "KEEP", 0)
    equal(expected, loaded(path, 3, rank=2))
    # A device with memory of its own is filled through a small buffer.
    monkeypatch.setattr(stream, "GROUP", 3000)
    checkpoint, declare, _ = opened(path, 3)
    plan = stream.plan(declare(), checkpoint, 3, 2)
    with direct.Reader(checkpoint.files) as reader:
        held = {
            name: stream.to_device(leaf, reader, checkpoint, jax.devices()[1])
            for name, leaf in plan.items()
        }
    equal(flat(expected), held)
    assert {d for a in jax.tree.leaves(held) for d in a.devices()} == {jax.devices()[1]}


def test_an_expanded_rank_equals_its_numbers(tmp_path):
    path = encoded(tmp_path / "checkpoint", "llama", "nvfp4")
    packed = flat(loaded(path, 2, rank=1))
    seen: dict[int, dict[str, int]] = {}
    expanded = flat(
        loaded(path, 2, rank=1, expand=lambda leaf: leaf.ndim > 1, before=seen.update)
    )
    for name, leaf in packed.items():
        np.testing.assert_array_equal(numbers(leaf), expanded[name])
    assert list(seen) == [1] and sum(seen[1].values()) == sum(a.nbytes for a in expanded.values())


def test_progress_counts_every_byte_once(tmp_path):
    path = encoded(tmp_path / "checkpoint", "llama", "fp8")
    seen: list[tuple[int, int]] = []
    params = loaded(path, progress=lambda *now: seen.append(now))
    size = sum(a.nbytes for a in jax.tree.leaves(params))
    assert {total for _, total in seen} == {size} and max(done for done, _ in seen) == size


def test_a_cpu_takes_the_buffers_over(tmp_path):
    """No second copy: the array lies where the bytes were read to."""
    array = direct.empty((300, 70), jnp.bfloat16)
    assert jax.device_put(array).unsafe_buffer_pointer() == array.ctypes.data


def test_only_the_share_is_read(tmp_path):
    rng = np.random.default_rng(0)
    save(tmp_path / "x.safetensors", {"w": rng.standard_normal((4096, 512), np.float32)})
    file = SafetensorsFile(tmp_path / "x.safetensors")
    view = file.read("w")[1024:2048]
    out = np.empty(view.shape, view.dtype)
    with direct.Reader([(file.path, file.bytes)]) as reader:
        reader.fill([(out, view)])
    np.testing.assert_array_equal(out, view)
    assert view.nbytes <= reader.read <= view.nbytes + 2 * direct.PAGE


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_view_arrives(tmp_path_factory, data):
    """Slices, steps, transposes, repeats, across file and chunk borders, whatever the alignment."""
    draw = data.draw
    rng = np.random.default_rng(draw(st.integers(0, 9)))
    path = tmp_path_factory.getbasetemp() / "any"
    raw = rng.integers(0, 256, draw(st.sampled_from([1, 4096, 9999, 300_000])), dtype=np.uint8)
    path.write_bytes(raw.tobytes())
    mapped = np.memmap(path, np.uint8, "r")
    width = draw(st.sampled_from([1, 2, 4]))
    start = draw(st.integers(0, len(raw) // 2))
    count = (len(raw) - start) // width
    plain = np.asarray(mapped)[start : start + count * width].view(f"u{width}")
    columns = draw(st.integers(1, max(1, min(count, 400))))
    view = plain[: count // columns * columns].reshape(-1, columns)
    a, b = draw(st.integers(0, len(view))), draw(st.integers(0, columns))
    view = view[a:, b:]
    view = draw(st.sampled_from([view, view.T, view[::2], view[:, ::3], view[None], view[:0]]))
    if draw(st.booleans()) and view.size:
        view = np.broadcast_to(view, (2, *view.shape))
    chunk = draw(st.sampled_from([4096, 10_000, 1 << 20]))
    old, direct.CHUNK, direct.LONG = (direct.CHUNK, direct.LONG), chunk, 512
    try:
        target = direct.empty(view.shape, view.dtype)
        with direct.Reader([(path, np.asarray(mapped))], direct=draw(st.booleans())) as reader:
            reader.fill([(target, view)])
        np.testing.assert_array_equal(target, np.array(view))
    finally:
        direct.CHUNK, direct.LONG = old


def test_numbers_change_their_dtype_on_the_way(tmp_path):
    save(tmp_path / "x.safetensors", {"w": np.arange(5000, dtype=np.int16).reshape(50, 100)})
    file = SafetensorsFile(tmp_path / "x.safetensors")
    out = np.empty((50, 100), np.float32)
    with direct.Reader([(file.path, file.bytes)]) as reader:
        reader.fill([(out, file.read("w"))])
    np.testing.assert_array_equal(out, np.arange(5000).reshape(50, 100))


def test_a_file_that_shrinks_is_named(tmp_path):
    path = encoded(tmp_path / "checkpoint", "llama", "fp8")
    checkpoint, declare, ignored = opened(path, 1)
    os.truncate(path / "a.safetensors", 20_000)
    with pytest.raises(CheckpointError, match=r"a\.safetensors: ends at byte"):
        load.load_params(declare(), checkpoint, ignored=ignored)


def test_several_ranks_need_a_mesh_or_a_rank(tmp_path):
    path = encoded(tmp_path / "checkpoint", "llama", "fp8")
    with pytest.raises(ValueError, match="2 ranks need a mesh"):
        loaded(path, 2)
