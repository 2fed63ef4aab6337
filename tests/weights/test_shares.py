"""Pulling what one rank reads: ranges of files, planned from headers, resumed, and held to what came."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from hub_server import COMMIT, Running, publish
from typer.testing import CliRunner

from sparkjax import config
from sparkjax.cli.app import app
from sparkjax.fetch import partial
from sparkjax.fetch.errors import FetchError
from sparkjax.fetch.hub import Hub
from sparkjax.fetch.pull import Pulled, pull
from sparkjax.fetch.source import Source
from sparkjax.fetch.store import PART, Store, read_record
from sparkjax.model import loaded_tree
from sparkjax.models.registry import family_of
from sparkjax.weights import fingerprint, load, ranges, spans
from sparkjax.weights.checkpoint import open_checkpoint
from sparkjax.weights.errors import CheckpointError

GOLDEN = Path(__file__).parents[1] / "golden"
REPO = "org/tiny"
SOURCE = Source(REPO)
WEIGHTS = "model.safetensors"


@pytest.fixture(autouse=True)
def small_scale(monkeypatch):
    """Limits as small as the checkpoints of these tests."""
    monkeypatch.setattr(spans, "GAP", 256)
    monkeypatch.setattr(ranges, "SMALL", 512)
    monkeypatch.setattr(partial, "PIECE", 8192)
    monkeypatch.setattr(fingerprint, "WHOLE", 1000)
    monkeypatch.setattr(fingerprint, "_EDGE", 300)
    monkeypatch.setattr(fingerprint, "_PIECE", 20)


def files_of(name: str) -> dict[str, bytes]:
    return {n: (GOLDEN / name / n).read_bytes() for n in ("config.json", WEIGHTS)}


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Running]:
    there = publish(tmp_path_factory.mktemp("there"), REPO, files_of("qwen3"))
    with Running(there)() as running:
        yield running


def fetch(hub: Running, here: Store, rank: int = 1, ranks: int = 2, **options) -> Pulled:
    origin = Hub(hub.url, token=False)
    return pull(SOURCE, here, origin, share=(rank, ranks), pause=lambda s: None, **options)


def loaded(path: Path, rank: int, ranks: int):
    checkpoint = open_checkpoint(path)
    family = family_of(checkpoint.config)
    tree, _ = loaded_tree(family, family.read_config(checkpoint.config), ranks, checkpoint)
    return load.load_params(tree, checkpoint, ranks=ranks, rank=rank, ignored=("*",))


def bytes_here(path: Path) -> int:
    """Bytes that a file has, holes left out."""
    return path.stat().st_blocks * 512


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "deepseek_v4",
        *(pytest.param(f, marks=pytest.mark.slow) for f in ("qwen3", "glm4_moe", "qwen3_5_moe")),
    ],
)
def test_a_share_loads_as_the_whole_does(tmp_path, here, family):
    """Every rank of two: fewer bytes than the file, and the same parameters, bit for bit."""
    files = files_of(family)
    with Running(publish(tmp_path / "there", REPO, files))() as hub:
        for rank in (0, 1):
            moves: list[tuple[int, int]] = []

            def moved(done: int, total: int, name: str, moves: list = moves) -> None:
                moves.append((done, total))

            got = fetch(hub, here, rank, progress=moved)
            assert got.path.name == f"{COMMIT}.{rank}of2" and got.bytes < sum(
                map(len, files.values())
            )
            assert moves[-1][0] == moves[-1][1]
            assert got.path.joinpath(WEIGHTS).stat().st_size == len(files[WEIGHTS])
            share, whole = loaded(got.path, rank, 2), loaded(GOLDEN / family, rank, 2)
            assert jax.tree.structure(share) == jax.tree.structure(whole)
            for one, other in zip(jax.tree.leaves(share), jax.tree.leaves(whole), strict=True):
                np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
            assert fingerprint.fingerprints(got.path) == fingerprint.fingerprints(
                here.commit(REPO, COMMIT).parents[2] / "there" / "org--tiny" / COMMIT
            )


def test_only_a_share_of_the_rows_comes(hub, here):
    got = fetch(hub, here)
    size = len(files_of("qwen3")[WEIGHTS])
    asked = [r for path, r in hub.faults.seen if path.endswith(WEIGHTS)]
    assert asked and all(r.startswith("bytes=") for r in asked)
    assert got.fetched < 0.9 * size
    parts = read_record(got.path).parts[WEIGHTS]
    data = (got.path / WEIGHTS).read_bytes()
    whole = files_of("qwen3")[WEIGHTS]
    assert all(data[b:e] == whole[b:e] for b, e, _ in parts) and data != whole
    # Once more moves nothing.
    before = len(hub.faults.seen)
    assert fetch(hub, here).fetched == 0 and len(hub.faults.seen) == before + 1


def test_a_share_is_found_where_nothing_else_is(hub, here):
    got = fetch(hub, here)
    assert config.locate(f"hf:{REPO}", str(here.folder)) == got.path
    assert here.find(Source(REPO, COMMIT)) == got.path
    fetch(hub, here, 0)
    with pytest.raises(FetchError, match=r"several shares are here.*0of2, .*1of2"):
        here.find(SOURCE)


def test_another_rank_is_refused(hub, here):
    got = fetch(hub, here)
    for rank, ranks, says in ((0, 2, "rank 0 of 2"), (0, 1, "rank 0 of 1"), (1, 4, "rank 1 of 4")):
        with pytest.raises(
            CheckpointError, match=f"holds what rank 1 of 2 reads; asked for is {says}"
        ):
            loaded(got.path, rank, ranks)


def test_cut_connections_are_taken_up_again(hub, here):
    hub.faults.cut = [None, None, None, 100, 3000, 0, 5]
    got = fetch(hub, here, parallel=2)
    loaded(got.path, 1, 2)


def test_what_came_before_a_failure_stays(hub, here):
    whole = fetch(hub, Store(here.folder / "other")).fetched
    hub.faults.reset()
    hub.faults.cut = [*[None] * 8, *[0] * 400]
    with pytest.raises(FetchError, match=r"gave up at bytes .* start again to go on"):
        fetch(hub, here, parallel=1)
    folder = here.share(REPO, COMMIT, 1, 2)
    assert (folder / (WEIGHTS + PART)).exists() and not (folder / WEIGHTS).exists()
    with pytest.raises(FetchError, match="is not in"):
        here.find(SOURCE)
    # A torn note and a range that was changed on the disk are not believed.
    log = folder / (WEIGHTS + partial.LOG)
    first = json.loads(log.read_text().splitlines()[-1])
    with log.open("a") as out:
        out.write('[5, 6, "ab')
    with (folder / (WEIGHTS + PART)).open("r+b") as out:
        out.seek(first[0])
        out.write(bytes(8))
    hub.faults.cut = []
    got = fetch(hub, here)
    assert 0 < got.fetched < whole
    loaded(got.path, 1, 2)
    assert not list(folder.glob("*" + PART))


def test_offline_finds_what_has_changed_in_a_share(hub, here):
    got = fetch(hub, here)
    assert pull(SOURCE, here, offline=True).path == got.path
    path = got.path / WEIGHTS
    begin, end, _ = read_record(got.path).parts[WEIGHTS][-1]
    with path.open("r+b") as file:
        file.seek((begin + end) // 2)
        byte = file.read(1)
        file.seek((begin + end) // 2)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(1, 1))
    with pytest.raises(FetchError, match="is not what was published"):
        pull(SOURCE, here, offline=True)
    got = fetch(hub, here)
    assert 0 < got.fetched <= 8192
    assert pull(SOURCE, here, offline=True, share=(1, 2)).path == got.path


def test_a_server_without_ranges_says_so(hub, here):
    hub.faults.whole = True
    with pytest.raises(FetchError, match="to a range; pull whole files, without --rank"):
        fetch(hub, here)


def test_a_share_is_not_passed_on(hub, here, tmp_path):
    fetch(hub, here)
    with Running(here)() as peer, pytest.raises(FetchError, match="no such repository"):
        pull(SOURCE, Store(tmp_path / "third"), Hub(peer.url, token=False))


def test_a_checkpoint_that_is_here_whole_stays_so(hub, here):
    whole = pull(SOURCE, here, Hub(hub.url, token=False))
    assert fetch(hub, here).path == whole.path and fetch(hub, here, 0, 1).path == whole.path


def test_what_this_code_cannot_read_is_pulled_whole(tmp_path, here):
    files = {**files_of("qwen3"), "config.json": b'{"model_type": "unheard"}'}
    with (
        Running(publish(tmp_path / "there", REPO, files))() as hub,
        pytest.raises(FetchError, match="pull whole files, without --rank"),
    ):
        fetch(hub, here)


def test_the_verb_pulls_a_share(hub, here):
    host, folder = hub.url.removeprefix("http://"), str(here.folder)
    done = CliRunner().invoke(
        app,
        ["pull", REPO, "--from", host, "--folder", folder, "--rank", "0", "--ranks", "2", "--json"],
    )
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["path"].endswith("0of2")


def test_fingerprints_are_of_the_checkpoint_alone(hub, here, tmp_path):
    """Two hosts pulled it at different times: the notes of the pulls differ, and nothing else."""
    one = pull(SOURCE, here, Hub(hub.url, token=False)).path
    copy = tmp_path / "copy"
    copy.mkdir()
    for name, data in files_of("qwen3").items():
        (copy / name).write_bytes(data)
    assert fingerprint.fingerprints(one) == fingerprint.fingerprints(copy)
    assert (one / ".pull.json").exists()


def test_ranges():
    assert spans.merged([(5, 9), (0, 3), (3, 3), (8, 12)], 1) == [(0, 3), (5, 12)]
    assert spans.merged([(5, 9), (0, 3)], 2) == [(0, 9)]
    assert spans.without([(0, 10), (20, 30)], [(2, 4), (25, 99), (9, 10)]) == [
        (0, 2),
        (4, 9),
        (20, 25),
    ]
    assert spans.without([(0, 5)], [(0, 5)]) == []
