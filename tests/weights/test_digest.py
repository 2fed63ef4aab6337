"""Digests: the same on host and device, different for what differs, and named when ranks disagree."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from sparkjax.mesh import gb10, spmd
from sparkjax.mesh.context import RANKS
from sparkjax.model import Model
from sparkjax.weights import digest
from sparkjax.weights.errors import CheckpointError
from sparkjax.weights.formats.scaled import ScaledTensor

DTYPES = [np.uint8, np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e8m0fnu]
SHAPES = [(), (4, 1), (2, 3, 7), (5, 70_001), (0, 4)]


def random(shape: tuple[int, ...], dtype: type, seed: int = 0) -> np.ndarray:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    return raw.view(dtype).reshape(shape)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """So that arrays of a test have several, the last one in part."""
    monkeypatch.setattr(digest, "BLOCK", 3 << 16)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_host_and_device_agree(dtype):
    arrays = [random(shape, dtype, i) for i, shape in enumerate(SHAPES)]
    expected = [digest.host(a) for a in arrays]
    on_device = [jnp.asarray(a) for a in arrays]
    assert digest.device(on_device) == expected
    if dtype != ml_dtypes.bfloat16:  # numbers that are none lose bits in XLA for CPUs
        assert digest.folded(on_device) == expected


def test_bfloat16_on_a_device():
    array = np.random.default_rng(0).standard_normal((5, 70_001)).astype(ml_dtypes.bfloat16)
    assert digest.folded([jnp.asarray(array)]) == [digest.host(array)]


def test_the_device_keeps_nothing_of_the_size_of_an_array(monkeypatch):
    monkeypatch.undo()
    arrays = [jax.ShapeDtypeStruct((64, 4096, 4096), d) for d in ("uint8", "float32")]
    with jax.enable_x64(True):
        compiled = digest._folded.lower(arrays).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 128 << 20


@pytest.mark.gb10
def test_gb10_keeps_nothing_of_the_size_of_an_array(monkeypatch):
    monkeypatch.undo()
    try:
        mesh = gb10.compile_only_mesh()
    except gb10.Unavailable as error:
        pytest.skip(str(error))
    place = NamedSharding(mesh, PartitionSpec())
    arrays = [
        jax.ShapeDtypeStruct((64, 8192, 8192), d, sharding=place)
        for d in ("uint8", "bfloat16", "float32")
    ]
    with jax.enable_x64(True):
        compiled = digest._folded.lower(arrays).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1 << 20


def test_the_formula():
    """Against plain integers."""

    def splitmix(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    assert splitmix(0) == 0xE220A8397B1DCDAF, "the first number of the published generator, seed 0"
    array = random((3, 50_001), np.uint8)
    total, i = 0, 0
    for row in array:
        padded = row.tobytes() + bytes(-len(row) % 4)
        for word in np.frombuffer(padded, "<u4"):
            near, far = splitmix(i % 2**16) | 1, splitmix(i // 2**16 + 2**40) | 1
            total, i = total + int(word) * near * far, i + 1
    assert digest.host(array) == total % 2**64


def test_pieces_add_up():
    array = random((40, 33, 7), ml_dtypes.bfloat16)
    flat = array.reshape(-1, 7)
    parts = [digest.host(flat[a:b], a) for a, b in [(900, 1320), (0, 1), (1, 900)]]
    assert sum(parts) % 2**64 == digest.host(array)


@pytest.mark.parametrize("dtype", [np.uint8, ml_dtypes.bfloat16, np.float32], ids=str)
def test_every_flipped_bit_is_noticed(dtype):
    array = random((3, 11), dtype)
    raw = array.view(np.uint8)
    right = digest.host(array)
    seen = {right}
    for at in range(raw.size):
        for bit in range(8):
            raw.reshape(-1)[at] ^= 1 << bit
            seen.add(digest.host(array))
            raw.reshape(-1)[at] ^= 1 << bit
    assert len(seen) == raw.size * 8 + 1
    assert digest.host(array) == right


def test_swaps_are_noticed():
    signs = np.where(np.arange(64) % 3 == 0, -1.0, 1.0).astype(np.float32)
    swapped = signs.copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    assert digest.host(swapped) != digest.host(signs)
    rows = random((200, 130), np.uint8)
    right = digest.host(rows)
    assert all(
        digest.host(np.roll(rows, i, axis)) != right for i in range(1, 100) for axis in (0, 1)
    )
    assert digest.host(rows.reshape(100, 260)) != right


@pytest.mark.parametrize("ranks", [1, 4])
def test_devices_are_told_apart(ranks):
    mesh = spmd.make_mesh(ranks) if ranks > 1 else None
    whole, shared = random((8, 12), np.float32), random((5, 3), np.uint8, 1)
    specs = {"a": PartitionSpec(RANKS), "b": PartitionSpec()}
    places = spmd.shardings(mesh, specs)
    params = {"a": jax.device_put(whole, places["a"]), "b": jax.device_put(shared, places["b"])}
    found = digest.of_device(params)
    assert list(found) == list(range(ranks))
    for rank, part in enumerate(np.split(whole, ranks)):
        assert found[rank] == digest.of_host({"a": part, "b": shared})


def test_planes_of_a_node_have_names():
    node = ScaledTensor(jnp.zeros((4, 8)), jnp.ones((4, 1)), None, (1, 8), 4, 8)
    tree = {"layers": {"q": jnp.zeros((2, 2)), "k": node}}
    names = [name for name, _ in digest.named(tree)]
    assert names[-1] == "layers.q" and all(n.startswith("layers.k.") for n in names[:-1])
    assert len(set(names)) == len(names) == 3


def test_notes_add_up():
    whole, shared = random((3, 40, 10), np.uint8), random((5,), np.float32, 1)
    notes = digest.Notes()
    notes.whole(0, "norm", shared)
    for first, last in [(60, 120), (0, 60)]:
        notes.rows(0, "w", whole, 0, whole.reshape(-1, 10)[first:last], first)
    notes.whole(1, "w", whole[::-1])
    found = notes.digests([0, 1])
    assert found[0] == digest.of_host({"norm": shared, "w": whole})
    assert found[1] == digest.of_host({"norm": shared, "w": whole[::-1]})


def test_a_difference_names_rank_and_tensor():
    read = {"a": "1", "b": "2"}
    assert digest.differences(read, read, 3) == []
    (told,) = digest.differences(read, {"a": "1", "b": "9"}, 3)
    assert told == "rank 3: b is 9 on the device, 2 was read"
    with pytest.raises(CheckpointError, match="model: rank 3: b is missing"):
        digest.require(digest.differences(read, {"a": "1"}, 3), "model")


def test_ranks_that_disagree_are_named():
    same = {"norm": "1", "w.packed": "2", "w.scale": "3", "wide": "0"}
    ranks = {0: same, 1: same, 2: {**same, "w.scale": "4", "wide": "8"}}
    assert digest.disagreements(ranks, {"norm", "w"}) == [
        "rank 2: w.scale is 4, the other ranks have 3"
    ]
    two = {0: same, 1: {**same, "norm": "7"}}
    assert digest.disagreements(two, {"norm"}) == ["norm: rank 0 has 1, rank 1 has 7"]
    assert digest.disagreements({0: same, 1: {}}, {"norm"}) == [
        "norm: rank 0 has 1, rank 1 has missing"
    ]
    assert digest.disagreements(ranks, set()) == []


# --- A loaded model ------------------------------------------------------------------------------

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize(("family", "ranks"), [("qwen3", 1), ("qwen3", 2)])
def test_a_model_knows_what_was_read(family, ranks):
    model = Model.load(GOLDEN / family, dtype="float32", ranks=ranks, check=True)
    assert sorted(model.digests) == list(range(ranks)) and model.weight_problems() == []
    spoiled = np.array(model.params["norm"])
    spoiled.view(np.uint8)[3] ^= 1
    model.params["norm"] = jax.device_put(spoiled, model.params["norm"].sharding)
    told = model.weight_problems()
    assert len(told) == ranks and told[0].startswith("rank 0: norm is ")


def test_a_device_that_holds_something_else_stops_the_start(monkeypatch):
    right = digest.host
    broken = lambda array, first_row=0: right(array, first_row) ^ (array.ndim == 1)  # noqa: E731
    monkeypatch.setattr(digest, "device", lambda tree: [broken(np.asarray(a)) for a in tree])
    with pytest.raises(
        CheckpointError, match=r"qwen3: rank 0: norm is \w+ on the device, \w+ was read"
    ):
        Model.load(GOLDEN / "qwen3", dtype="float32", check=True)


def test_a_model_without_digests_says_so():
    with pytest.raises(ValueError, match="check=True"):
        Model.load(GOLDEN / "qwen3", dtype="float32").weight_problems()
