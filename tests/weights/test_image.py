"""The image of a rank's weights: the same bits, or nothing; never something in between."""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import os
import random
import signal
from collections.abc import Iterable
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

from sparkjax.models import params as declarations
from sparkjax.models.registry import family_of
from sparkjax.weights import direct, formats, image, load
from sparkjax.weights.checkpoint import open_checkpoint
from sparkjax.weights.formats import ROWS
from sparkjax.weights.formats.fp8 import fp8_tensor
from sparkjax.weights.formats.gguf import KINDS, gguf_tensor
from sparkjax.weights.formats.nvfp4 import nvfp4_compressed
from sparkjax.weights.stream import to_host

GOLDEN = Path(__file__).parents[1] / "golden"
KEY = {"a": 1}


def held(seed: int = 0, rows: int = 40) -> dict:
    """Parameters of every shape of node: arrays, planes, nothing, several formats, covers."""
    rng = np.random.default_rng(seed)
    fp8 = rng.standard_normal((rows, 64)).astype(ml_dtypes.float8_e4m3fn)
    scaled = fp8_tensor(fp8, rng.random((rows // 8, 4)).astype(np.float32), (8, 16))
    dense = rng.standard_normal((rows, 64)).astype(ml_dtypes.bfloat16)
    four = nvfp4_compressed(
        rng.integers(0, 256, (rows, 32), dtype=np.uint8),
        rng.random((rows, 4)).astype(ml_dtypes.float8_e4m3fn),
        np.ones(1, np.float32),
    )
    kind = KINDS["Q4_1"]
    raw = rng.integers(0, 64, (rows, 2 * kind.nbytes), dtype=np.uint8)
    blocks = gguf_tensor(raw, "Q4_1")
    return {
        "norm": rng.standard_normal(7).astype(np.float32),
        "one": np.float32(seed).reshape(()),
        "none": np.zeros((0, 3), np.float32),
        "layers.dense": np.stack([dense] * 3),
        "layers.mixed": formats.stack([scaled, dense, scaled, four], (2, 2)),
        "layers.fp8": formats.stack([scaled, scaled], (2,)),
        "layers.cover": formats.stack([formats.pick(blocks, -1, np.arange(5, 30))] * 2, (2,)),
        "head": formats.pick(scaled, ROWS, np.arange(3, 19)),
    }


def same(a, b) -> bool:
    if jax.tree.structure(a) != jax.tree.structure(b):
        return False
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(x.dtype == y.dtype and np.array_equal(np.asarray(x), y) for x, y in pairs)


def read(path: Path, key=KEY, **options) -> dict | None:
    opened = image.open_image(path, key, **options)
    if opened is None:
        return None
    with direct.Reader([(opened.path, opened.mapped)]) as reader:
        found = to_host(list(opened.leaves.values()), reader, None)
        return dict(zip(opened.leaves, found, strict=True))


def test_what_comes_back_is_what_was_written(tmp_path):
    params = held()
    image.write_image(tmp_path / "x.img", KEY, params)
    assert same(params, read(tmp_path / "x.img", verify=True))
    assert [p.name for p in tmp_path.iterdir()] == ["x.img"]


def test_blobs_begin_on_pages(tmp_path):
    image.write_image(tmp_path / "x.img", KEY, held())
    opened = image.open_image(tmp_path / "x.img", KEY)
    starts = {
        (s.ctypes.data - opened.mapped.ctypes.data) % direct.PAGE
        for leaf in opened.leaves.values()
        for plane in jax.tree.leaves(leaf.tree)
        for s in plane.sources
        if s.size
    }
    assert starts == {0}


def test_a_file_system_without_direct_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(image, "DIRECT", 0)
    monkeypatch.setattr(direct, "DIRECT", 0)
    image.write_image(tmp_path / "x.img", KEY, held())
    assert same(held(), read(tmp_path / "x.img"))


def test_another_key_is_not_used_and_said_why(tmp_path, caplog):
    image.write_image(tmp_path / "x.img", {"files": 1, "rank": 0}, held())
    assert read(tmp_path / "x.img", {"files": 2, "rank": 0}) is None
    assert "made from another files" in caplog.text


def test_damage_is_found(tmp_path):
    """Any byte of the header or the table, any length; of a blob where it is asked for."""
    path = tmp_path / "x.img"
    image.write_image(path, KEY, held())
    whole = path.read_bytes()
    offset = int.from_bytes(whole[16:24], "little")
    rng = random.Random(0)
    logging.disable(logging.WARNING)
    try:
        table = [*range(image.HEADER.size), *rng.sample(range(offset, len(whole)), 60)]
        for at in [i for i in table if not 12 <= i < 16]:
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            assert read(path) is None, at
        for length in [0, 1, 55, 4096, *rng.sample(range(len(whole)), 40), len(whole) - 1]:
            path.write_bytes(whole[:length])
            assert read(path) is None, length
        path.write_bytes(whole + b"x")
        assert read(path) is None
        path.write_bytes(whole[:4096] + bytes([whole[4096] ^ 1]) + whole[4097:])
        assert read(path, verify=True) is None
    finally:
        logging.disable(logging.NOTSET)


def test_a_table_that_lies_is_refused(tmp_path):
    """With a valid digest too: planes outside of the file, unknown nodes, nonsense."""
    path = tmp_path / "x.img"
    image.write_image(path, KEY, held())
    whole = path.read_bytes()
    offset, length = (int.from_bytes(whole[i : i + 8], "little") for i in (16, 24))
    table = json.loads(whole[offset:])

    def changed(change) -> bytes:
        """The file with another table under a digest of its own."""
        new = json.loads(json.dumps(table))
        new["size"] = offset + 2 * length
        change(new)
        text = json.dumps(new).encode().ljust(2 * length)
        digest = hashlib.sha256(text).digest()
        head = image.HEADER.pack(image.MAGIC, 1, 0, offset, len(text), digest)
        return head + whole[len(head) : offset] + text

    norm = lambda t: t["params"]["norm"]  # noqa: E731
    lies = [
        lambda t: norm(t).update(offset=1 << 40),
        lambda t: norm(t).update(offset=-4096),
        lambda t: norm(t).update(offset=4097),
        lambda t: norm(t).update(shape=[1 << 60]),
        lambda t: norm(t).update(shape=[-7]),
        lambda t: norm(t).update(shape="x"),
        lambda t: norm(t).update(dtype="object"),
        lambda t: norm(t).update(dtype="nothing"),
        lambda t: t["params"]["head"].update(node="Path"),
        lambda t: t["params"]["head"].update(fields={}),
        lambda t: t.update(params=[]),
        lambda t: t.pop("key"),
    ]
    path.write_bytes(changed(lambda t: None))
    assert same(held(), read(path))
    for lie in lies:
        path.write_bytes(changed(lie))
        with pytest.raises(image.Unusable):
            image.read_image(path, KEY)


@pytest.mark.parametrize("step", range(0, 7))
def test_a_writer_that_fails_leaves_what_was_there(tmp_path, monkeypatch, step):
    path = tmp_path / "x.img"
    image.write_image(path, KEY, held(1))
    calls = 0

    def failing(real):
        def call(*args):
            nonlocal calls
            calls += 1
            if calls > step:
                raise OSError(28, "No space left on device")
            return real(*args)

        return call

    for name in ("pwrite", "fsync", "ftruncate"):
        monkeypatch.setattr(os, name, failing(getattr(os, name)))
    written = image.save(path, KEY, held(2))
    monkeypatch.undo()
    now = read(path, verify=True)
    assert same(held(2), now) or (not written and same(held(1), now))
    assert [p.name for p in tmp_path.iterdir()] == ["x.img"]


def test_no_room_is_said_before_anything_is_written(tmp_path, monkeypatch, caplog):
    status = os.statvfs(tmp_path)
    full = os.statvfs_result((*status[:4], 0, *status[5:]))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    assert not image.save(tmp_path / "x.img", KEY, held())
    assert "GiB are needed" in caplog.text and not list(tmp_path.iterdir())


def die(path: str, seed: int, moment: int) -> None:
    """Writes an image and is killed at its `moment`-th call to the system, in the middle of it."""
    calls = 0
    real = {name: getattr(os, name) for name in ("pwrite", "fsync", "ftruncate", "replace")}

    def dying(name: str):
        def call(*args):
            nonlocal calls
            calls += 1
            if calls > moment:
                if name == "pwrite":
                    half = direct.down(len(args[1]) // 2) if len(args[1]) > 4096 else 20
                    real["pwrite"](args[0], args[1][:half], args[2])
                os.kill(os.getpid(), signal.SIGKILL)
            return real[name](*args)

        return call

    for name in real:
        setattr(os, name, dying(name))
    image.CHUNK = 16 << 10
    image.write_image(Path(path), KEY, held(seed))


def killed(folder: Path, moments: Iterable[int]) -> None:
    path = folder / "x.img"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["sparkjax.weights.image"])
    current, exits = None, set()
    for seed, moment in enumerate(moments, 1):
        process = context.Process(target=die, args=(str(path), seed, moment))
        process.start()
        process.join()
        exits.add(process.exitcode)
        params = read(path, verify=True)
        if params is not None and int(params["one"]) == seed:
            current = seed
        # Either all of the new one, or the old one untouched.
        assert (params is None) == (current is None)
        assert params is None or same(held(current), params)
    assert exits == {-signal.SIGKILL, 0}
    # The next writer clears away what the dead ones left.
    image.write_image(path, KEY, held(0))
    assert [p.name for p in folder.iterdir()] == ["x.img"]


def test_kill_9_leaves_a_whole_image_or_none(tmp_path):
    rng = random.Random(1)
    killed(tmp_path, [40, *(rng.randrange(16) for _ in range(50))])


# --- Through the loader ---------------------------------------------------------------------------


def load_llama(path: Path, folder: Path, rank: int = 0, **facts):
    checkpoint = open_checkpoint(path)
    family = family_of(checkpoint.config)
    tree = family.declare(family.read_config(checkpoint.config), 2)
    params = load.load_params(
        tree, checkpoint, ranks=2, rank=rank, images=load.Images(folder), facts=facts
    )
    return dict(declarations.leaves_of(params))


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    folder = tmp_path / "llama"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((GOLDEN / "llama" / name).read_bytes())
    return folder


def test_the_second_start_reads_the_image(llama, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    first = load_llama(llama, tmp_path / "images")
    assert "written in" in caplog.text
    seen = [p.name for p in (tmp_path / "images").iterdir()]
    assert len(seen) == 1 and seen[0].endswith("-rank0of2.img")
    second = load_llama(llama, tmp_path / "images")
    assert f"weights come from {tmp_path / 'images' / seen[0]}" in caplog.text
    assert same(second, jax.tree.map(np.asarray, first))
    # The other rank has its own.
    load_llama(llama, tmp_path / "images", rank=1)
    assert len(list((tmp_path / "images").iterdir())) == 2


@pytest.mark.parametrize("change", ["touch", "config", "facts", "damage"])
def test_whatever_changed_makes_a_new_image(llama, tmp_path, caplog, change):
    images, facts = tmp_path / "images", {"platform": "cpu"}
    expected = load_llama(llama, images, **facts)
    (file,) = images.iterdir()
    before = file.read_bytes()
    if change == "touch":
        os.utime(llama / "model.safetensors", ns=(1, 1))
    elif change == "config":
        config = json.loads((llama / "config.json").read_text())
        (llama / "config.json").write_text(json.dumps({**config, "note": 1}))
    elif change == "facts":
        facts = {"platform": "cuda"}
    else:
        file.write_bytes(before[: len(before) // 2])
    again = load_llama(llama, images, **facts)
    assert "is not used" in caplog.text
    assert same(again, jax.tree.map(np.asarray, expected))
    assert [p.name for p in images.iterdir()] == [file.name]
    image.read_image(file, None, verify=True)
