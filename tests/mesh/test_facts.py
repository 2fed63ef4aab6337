"""What ranks compare before they load anything: every setting, file and version, each on its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkjax import versions
from sparkjax.config import FIELDS, load, shared
from sparkjax.mesh.world import compare
from sparkjax.mesh.world.world import WorldError
from sparkjax.settings import LOCAL
from sparkjax.weights import fingerprint

DECIDING = sorted(k for k in FIELDS if k not in LOCAL and not k.startswith(("http.", "log.")))


def test_every_setting_that_decides_is_compared():
    assert sorted(shared(load(environ={}))) == DECIDING


@pytest.mark.parametrize("key", DECIDING)
def test_each_setting_changed_once_is_named_alone(key: str):
    facts = {f"config {k}": repr(v) for k, v in shared(load(environ={})).items()}
    changed = facts | {f"config {key}": "another value"}
    with pytest.raises(WorldError) as caught:
        compare.agree([compare.encode(f) for f in (facts, changed, facts)])
    line = f"config {key} differs: rank 0, 2: {facts[f'config {key}']}; rank 1: another value"
    assert caught.value.problems[1:] == (line,)


def test_files_that_differ_have_other_fingerprints(tmp_path: Path, monkeypatch):
    """Small files by any byte; large ones by size, ends and pieces."""
    file = tmp_path / "model.safetensors"
    data = bytes(range(256)) * 4096
    file.write_bytes(data)
    (tmp_path / "notes.md").write_text("not a part of the model")
    whole = fingerprint.fingerprints(tmp_path)
    assert list(whole) == ["model.safetensors"] and "1048576 bytes" in whole[file.name]
    monkeypatch.setattr(fingerprint, "WHOLE", 1024)
    monkeypatch.setattr(fingerprint, "_EDGE", 4096)
    monkeypatch.setattr(fingerprint, "_PIECE", 4096)
    seen = {whole[file.name], fingerprint.fingerprint(file)}
    assert len(seen) == 2
    for at in (0, len(data) - 1, len(data) // 17):
        file.write_bytes(data[:at] + b"?" + data[at + 1 :])
        seen.add(fingerprint.fingerprint(file))
    file.write_bytes(data[:-1])
    seen.add(fingerprint.fingerprint(file))
    assert len(seen) == 6


def test_versions_name_this_code(tmp_path: Path, monkeypatch):
    found = versions.versions()
    assert {"python", "jax", "jaxlib", "numpy", "sparkjax code"} <= found.keys()
    copy = tmp_path / "sparkjax"
    copy.mkdir()
    (copy / "versions.py").write_text("a = 1\n")
    monkeypatch.setattr(versions, "__file__", str(copy / "versions.py"))
    first = versions.code_digest()
    (copy / "notes.txt").write_text("no code")
    assert versions.code_digest() == first
    (copy / "versions.py").write_text("a = 2\n")
    assert versions.code_digest() != first
