"""Pulling from a hub and from another box: whole, hashed, resumed, and never half believed."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from hub_server import COMMIT, Running, publish
from safetensors.numpy import save
from typer.testing import CliRunner

from sparkjax import config
from sparkjax.cli.app import app
from sparkjax.fetch import pull as pulling
from sparkjax.fetch import select, store
from sparkjax.fetch.errors import FetchError
from sparkjax.fetch.hub import Hub, box
from sparkjax.fetch.pull import pull
from sparkjax.fetch.source import Source, named, parse
from sparkjax.fetch.store import PART, RECORD, Store
from sparkjax.weights.checkpoint import open_checkpoint
from sparkjax.weights.errors import CheckpointError

GOLDEN = Path(__file__).parents[1] / "golden" / "qwen3"
REPO = "org/tiny"
SOURCE = Source(REPO)


def no_pause(seconds: float) -> None:
    """The tests' connections come back at once."""


def model_files() -> dict[str, bytes]:
    """A repository: a real tiny checkpoint, and what repositories have beside that."""
    files = {n: (GOLDEN / n).read_bytes() for n in ("config.json", "model.safetensors")}
    return files | {
        "tokenizer.json": b"{}",
        "README.md": b"words",
        "pytorch_model.bin": b"a pickle",
        "extra/config.json": b"{}",
    }


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Running]:
    there = publish(tmp_path_factory.mktemp("there"), REPO, model_files())
    with Running(there)() as running:
        yield running


def fetch(hub: Running, here: Store, source: Source = SOURCE, **options) -> pulling.Pulled:
    return pull(source, here, Hub(hub.url, token=False), pause=no_pause, **options)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in folder.rglob("*")
        if p.is_file() and p.name not in (RECORD, ".lock")
    }


WANTED = {
    n: b
    for n, b in model_files().items()
    if n in ("config.json", "model.safetensors", "tokenizer.json")
}


def test_a_pull_brings_what_serving_needs_and_the_model_loads(hub, here):
    moves: list[tuple[int, int]] = []
    got = fetch(hub, here, progress=lambda done, total, name: moves.append((done, total)))
    assert contents(got.path) == WANTED
    assert got.commit == COMMIT and got.fetched == sum(map(len, WANTED.values())) == moves[-1][0]
    assert moves[-1][0] == moves[-1][1]
    assert here.find(SOURCE) == got.path == here.find(Source(REPO, COMMIT[:9]))
    found = config.locate(f"hf:{REPO}", str(here.folder))
    assert open_checkpoint(found).names
    # Once more moves nothing, and reads nothing.
    asked = len(hub.faults.seen)
    assert fetch(hub, here).fetched == 0
    assert len(hub.faults.seen) == asked + 1


def test_what_is_not_pulled_is_said(here):
    with pytest.raises(
        config.ConfigError, match=r"model\.path: hf:org/tiny is not in .*: sparkjax pull org/tiny"
    ):
        config.locate(f"hf:{REPO}", str(here.folder))
    with pytest.raises(FetchError, match="--offline fetches nothing"):
        pull(SOURCE, here, offline=True)


def test_connections_cut_in_the_middle_are_taken_up_again(hub, here):
    size = len(WANTED["model.safetensors"])
    hub.faults.cut = [None, None, 1000, 70_000, 1, size // 3]
    got = fetch(hub, here, parallel=1)
    assert contents(got.path) == WANTED
    starts = [r for path, r in hub.faults.seen if path.endswith("model.safetensors")]
    assert len(starts) >= 3 and starts[0] == "" and all(r.startswith("bytes=") for r in starts[1:])
    assert got.fetched == sum(map(len, WANTED.values()))


def test_a_dead_connection_ends_and_what_came_stays(hub, here):
    hub.faults.cut = [None, None, 50_000, *[0] * 40]
    with pytest.raises(
        FetchError, match=r"model\.safetensors: gave up at 50000 of \d+ bytes.*start again"
    ):
        fetch(hub, here, parallel=1)
    part = here.commit(REPO, COMMIT) / ("model.safetensors" + PART)
    assert part.stat().st_size == 50_000
    with pytest.raises(FetchError, match="files are missing"):
        here.find(SOURCE)
    hub.faults.cut = []
    got = fetch(hub, here)
    assert got.fetched < sum(map(len, WANTED.values())) - 49_000
    assert contents(got.path) == WANTED


def test_a_server_without_ranges_costs_time_and_nothing_else(hub, here):
    hub.faults.whole = True
    hub.faults.cut = [None, None, 30_000]
    assert contents(fetch(hub, here, parallel=1).path) == WANTED


def test_a_wrong_bit_is_noticed_and_fetched_again(hub, here):
    hub.faults.flip = 1
    assert contents(fetch(hub, here).path) == WANTED
    shutil.rmtree(here.folder)
    hub.faults.flip = 2
    with pytest.raises(
        FetchError, match=r"model\.safetensors: sha256 is .* not\s+the published one"
    ):
        fetch(hub, here)
    assert "model.safetensors" not in contents(here.commit(REPO, COMMIT))


def test_a_wrong_partial_file_of_before_is_fetched_again(hub, here):
    folder = here.commit(REPO, COMMIT)
    folder.mkdir(parents=True)
    (folder / ("model.safetensors" + PART)).write_bytes(b"x" * 5000)
    (folder / ("config.json" + PART)).write_bytes(b"y" * 100_000)
    assert contents(fetch(hub, here).path) == WANTED


def test_offline_finds_what_has_changed(hub, here):
    got = fetch(hub, here)
    asked = len(hub.faults.seen)
    assert pull(SOURCE, here, offline=True).path == got.path
    path = got.path / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    with pytest.raises(FetchError, match="changed"):
        here.find(SOURCE)
    with pytest.raises(FetchError, match=r"model\.safetensors is not what was published"):
        pull(SOURCE, here, offline=True)
    assert len(hub.faults.seen) == asked
    assert contents(fetch(hub, here).path) == WANTED


def test_a_disk_without_room_is_told_before_the_first_byte(hub, here, monkeypatch):
    usage = shutil._ntuple_diskusage(10**12, 10**12, (1 << 30) + 200_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(
        FetchError, match=r"KiB are to come and 1\.0 GiB stay free, but .* has only 1\.0 GiB"
    ):
        fetch(hub, here)
    assert not any(path.endswith("model.safetensors") for path, _ in hub.faults.seen)


def test_two_pulls_at_once_are_refused(hub, here):
    with (
        store.locked(here.commit(REPO, COMMIT)),
        pytest.raises(FetchError, match="another pull is at work"),
    ):
        fetch(hub, here)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (Source("org/other"), "has no such repository"),
        (Source(REPO, "b" * 40), "no such repository"),
        (Source(REPO, file="x.gguf"), "there is no file x.gguf; .gguf files: none"),
    ],
)
def test_what_the_hub_does_not_have(hub, here, source, says):
    with pytest.raises(FetchError, match=says):
        fetch(hub, here, source)


def test_a_hub_that_is_not_there(here):
    with pytest.raises(FetchError, match=r"hf:org/tiny: http://127\.0\.0\.1:9 does not answer"):
        pull(SOURCE, here, Hub("http://127.0.0.1:9", token=False))


def test_one_gguf_file_of_several(tmp_path, here):
    files = {"a.Q4_0.gguf": b"GGUF one", "b.Q8_0.gguf": b"GGUF two", "config.json": b"{}"}
    with Running(publish(tmp_path / "there", REPO, files))() as hub:
        with pytest.raises(
            FetchError, match=r"name one of its \.gguf files.*: a\.Q4_0\.gguf, b\.Q8_0\.gguf"
        ):
            fetch(hub, here)
        source = parse(f"hf:{REPO}/b.Q8_0.gguf")
        assert fetch(hub, here, source).path.read_bytes() == b"GGUF two"
    path = config.locate(f"hf:{REPO}/b.Q8_0.gguf", str(here.folder))
    assert path.read_bytes() == b"GGUF two"


# --- From another box ----------------------------------------------------------------------------


def test_a_box_copies_from_a_box(hub, here, tmp_path):
    fetch(hub, here)
    third = Store(tmp_path / "third")
    with Running(here)() as peer:
        peer.faults.cut = [10, 40_000]
        got = pull(SOURCE, third, Hub(peer.url, token=False), pause=no_pause)
    assert contents(got.path) == WANTED


def test_a_box_offers_only_what_is_whole_and_unchanged(hub, here, tmp_path):
    got = fetch(hub, here)
    record = store.read_record(got.path)
    with Running(here)() as peer:
        base = f"{peer.url}/{REPO}/resolve/{COMMIT}"
        assert httpx.get(f"{base}/config.json").content == WANTED["config.json"]
        part = httpx.get(f"{base}/model.safetensors", headers={"Range": "bytes=5-14"})
        assert part.status_code == 206 and part.content == WANTED["model.safetensors"][5:15]
        for path in (
            "README.md",
            RECORD,
            ".lock",
            "../config.json",
            "%2e%2e/config.json",
            "/etc/passwd",
            "..%2f..%2fx",
        ):
            assert httpx.get(f"{base}/{path}").status_code == 404, path
        for other in ("org/none", "../org", "..%2f/x"):
            assert httpx.get(f"{peer.url}/{other}/resolve/main/config.json").status_code == 404
        record.left_out = ["vision.safetensors"]
        store.write_record(got.path, record)
        assert httpx.get(f"{base}/config.json").status_code == 404
        record.left_out = []
        store.write_record(got.path, record)
        (got.path / "tokenizer.json").write_bytes(b"[]")
        assert httpx.get(f"{base}/config.json").status_code == 404


def test_a_shared_folder_may_ask_for_a_key(hub, here, tmp_path):
    fetch(hub, here)
    third = Store(tmp_path / "third")
    with Running(here, keys=("secret",))() as peer:
        with pytest.raises(FetchError):
            pull(SOURCE, third, Hub(peer.url, token=False), pause=no_pause)
        got = pull(SOURCE, third, Hub(peer.url, token="secret"), pause=no_pause)
    assert contents(got.path) == WANTED


def test_box_addresses():
    assert box("spark-2") == "http://spark-2:8765"
    assert box("http://10.0.0.2:99/") == "http://10.0.0.2:99"
    for wrong in ("", "a b", "x/y", "file:///etc", "a:b"):
        with pytest.raises(FetchError, match="is no box"):
            box(wrong)


# --- What is meant, and which files that is ------------------------------------------------------


def test_sources():
    assert parse("hf:a/b@v1.0") == Source("a/b", "v1.0")
    assert parse("a/b/c/d.gguf@x") == Source("a/b", "x", "c/d.gguf")
    assert str(parse("hf:a/b/d.gguf@x")) == "hf:a/b/d.gguf@x"
    for wrong in ("hf:a", "a/../b", "a/b@../x", "/etc/passwd", "a/b/c.bin", "a/b@", "..//b"):
        with pytest.raises(FetchError, match="no checkpoint of the hub"):
            parse(wrong)


def test_manifests_are_names_too(tmp_path):
    assert named("deepseek-v4-flash") == Source("deepseek-ai/DeepSeek-V4-Flash-0731")
    assert named("deepseek-v4-flash@abc").revision == "abc"
    with pytest.raises(
        FetchError, match=r"neither ORG/NAME nor a manifest; manifests: .*qwen3-0\.6b"
    ):
        named("gpt-9")
    with pytest.raises(FetchError, match="names no repository"):
        named("glm-5.3-int4-int8mix")


def test_names_of_files_stay_inside():
    for wrong in ("../x", "/x", "a//b", "a/./b", "x.part", ".pull.json", "a\\b", ".lock", ""):
        with pytest.raises(FetchError, match="not allowed"):
            store.check_name(wrong)


def test_weights_that_are_never_read_are_left_out_for_a_rank(tmp_path, here):
    config_values = json.loads((GOLDEN.parent / "qwen3_5" / "config.json").read_text())
    weight_map = {
        "model.language_model.embed_tokens.weight": "a.safetensors",
        "model.visual.merger.norm.weight": "b.safetensors",
    }
    assert select.unread(config_values, weight_map) == {"b.safetensors"}
    assert select.unread({"model_type": "unheard"}, weight_map) == set()
    files = {
        "config.json": json.dumps(config_values).encode(),
        select.INDEX: json.dumps({"weight_map": weight_map}).encode(),
        "a.safetensors": b"a" * 10,
        "b.safetensors": b"b" * 10,
        "c.safetensors": b"in no index",
    }
    with Running(publish(tmp_path / "there", REPO, files))() as hub:
        got = fetch(hub, here, needed=True)
        assert set(contents(got.path)) == {"config.json", select.INDEX, "a.safetensors"}
        assert store.read_record(got.path).left_out == ["b.safetensors"]
        assert set(contents(fetch(hub, here).path)) == set(files) - {"c.safetensors"}
        assert store.read_record(got.path).left_out == []


def test_a_share_without_the_vision_tower_loads(tmp_path, here):
    """The golden checkpoint in two files, one of which nobody reads."""
    whole = open_checkpoint(GOLDEN.parent / "qwen3_5")
    parts = {"a.safetensors": {}, "b.safetensors": {}}
    for name in sorted(whole.names):
        parts["b.safetensors" if "visual" in name else "a.safetensors"][name] = whole.read(name)
    weight_map = {name: file for file, tensors in parts.items() for name in tensors}
    files = {file: save(tensors) for file, tensors in parts.items()}
    files["config.json"] = (GOLDEN.parent / "qwen3_5" / "config.json").read_bytes()
    files[select.INDEX] = json.dumps({"weight_map": weight_map}).encode()
    with Running(publish(tmp_path / "there", REPO, files))() as hub:
        path = fetch(hub, here, needed=True).path
    assert not (path / "b.safetensors").exists() and parts["b.safetensors"]
    assert open_checkpoint(path).names == set(parts["a.safetensors"])
    (path / RECORD).write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_checkpoint(path)


def test_the_verb(hub, here, monkeypatch):
    run = CliRunner().invoke
    host = hub.url.removeprefix("http://")
    folder = str(here.folder)
    done = run(app, ["pull", REPO, "--from", host, "--folder", folder, "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["commit"] == COMMIT
    checked = run(app, ["pull", REPO, "--offline", "--folder", folder])
    assert checked.exit_code == 0 and "all hashes right" in checked.stdout
    assert run(app, ["pull", "org/none", "--from", host, "--folder", folder]).exit_code == 1
    assert run(app, ["pull"]).exit_code == 1
    wrong = run(app, ["pull", REPO, "--rank", "2", "--ranks", "2", "--folder", folder])
    assert wrong.exit_code == 1 and "--rank is 2; allowed: below --ranks, which is 2" in wrong.output


# --- Killed at random moments --------------------------------------------------------------------

CHILD = """
import sys
from pathlib import Path
from sparkjax.fetch.hub import Hub
from sparkjax.fetch.pull import pull
from sparkjax.fetch.source import Source
from sparkjax.fetch.store import Store
seen = 0
def progress(done, total, name):
    print(done, flush=True)
pull(Source("org/tiny"), Store(Path(sys.argv[1])), Hub(sys.argv[2], token=False), progress=progress)
"""


def killed(hub: Running, folder: Path, lines: int) -> None:
    """Runs a pull and kills it after it has told of so many steps."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(folder), hub.url], stdout=subprocess.PIPE, text=True
    )
    for _ in range(lines):
        if not child.stdout.readline():
            break
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()


def survives(tmp_path: Path, times: int) -> None:
    rng = random.Random(0)
    blob = np.random.default_rng(0).bytes(3_000_000)
    files = {**model_files(), "model.safetensors": blob}
    wanted = {**WANTED, "model.safetensors": blob}
    with Running(publish(tmp_path / "there", REPO, files))() as hub:
        folder = tmp_path / "here"
        here = Store(folder)
        for _ in range(times):
            killed(hub, folder, rng.randrange(60))
            whole = contents(here.commit(REPO, COMMIT)) if folder.exists() else {}
            # Whatever has its own name is right.
            for name, data in whole.items():
                if not name.endswith(PART):
                    assert data == wanted[name], name
            try:
                assert contents(here.find(SOURCE)) == wanted
                shutil.rmtree(folder)
            except FetchError:
                pass
        assert {
            n: b for n, b in contents(fetch(hub, here).path).items() if not n.endswith(PART)
        } == wanted
        assert contents(here.find(SOURCE)) == wanted


def test_a_killed_pull_goes_on(tmp_path):
    survives(tmp_path, 3)


@pytest.mark.slow
def test_a_pull_killed_at_fifty_random_moments_goes_on(tmp_path):
    survives(tmp_path, 50)
