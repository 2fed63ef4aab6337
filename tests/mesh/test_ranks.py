"""Several processes compute what one computes, and all of them the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import quick
from served_world import SIZES, free_ports

HERE = Path(__file__).resolve().parent
GOLDEN = HERE.parent / "golden"
SMALL = ["engine.slots=3", "engine.context=96", "engine.kv_tokens=512", "engine.tiles=[64]"]
FAMILIES = sorted(p.name for p in GOLDEN.iterdir() if (p / "config.json").exists())
MARGIN = 2e-4
"""Sums over ranks round differently from one process's: log-probabilities may be off by so much, and
so may the choice between two tokens that are this close."""


def compute(
    folder: Path, families: list[str], ranks: int, transport: str = "shm", requests: int = 6
) -> list[dict]:
    """What every rank says of every family."""
    folder.mkdir()
    models = [str(GOLDEN / family) for family in families]
    job = {
        "models": models,
        "peers": [f"127.0.0.1:{p}" for p in free_ports(ranks)] if ranks > 1 else [],
        "transport": transport,
        "requests": requests,
        "out": str(folder),
        "sets": SIZES if families == ["llama"] else SMALL,
    }
    (folder / "job.json").write_text(json.dumps(job))
    environ = {
        **os.environ,
        "PYTHONPATH": str(HERE.parent.parent),
        **quick.ENVIRON,
    }
    processes = []
    for rank in range(ranks):
        with (folder / f"{rank}.log").open("w") as log:
            command = [sys.executable, str(HERE / "rank_engine.py"), str(folder / "job.json")]
            processes.append(
                subprocess.Popen(
                    [*command, str(rank)], stdout=log, stderr=subprocess.STDOUT, env=environ
                )
            )
    try:
        codes = [p.wait(1200) for p in processes]
    finally:
        for p in processes:
            p.kill()
    logs = "\n".join((folder / f"{rank}.log").read_text()[-3000:] for rank in range(ranks))
    assert codes == [0] * ranks, logs
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    return [{Path(m).name: value for m, value in f.items()} for f in found]


def close(one: dict, several: dict) -> None:
    """The same requests, but for rounding: up to the first near-tie, then no further."""
    assert one.keys() == several.keys()
    for id, mine in one.items():
        theirs = several[id]
        for a, b in zip(mine["prompt"], theirs["prompt"], strict=True):
            assert a[0] == b[0]
            assert abs(float.fromhex(a[1]) - float.fromhex(b[1])) < MARGIN
        for a, b in zip(mine["logprobs"], theirs["logprobs"], strict=False):
            if a[0] != b[0]:
                best = [float.fromhex(p) for _, p in a[2]]
                assert abs(best[0] - best[1]) < MARGIN, (id, a, b)
                break
            assert abs(float.fromhex(a[1]) - float.fromhex(b[1])) < MARGIN, (id, a, b)
        else:
            assert mine["tokens"] == theirs["tokens"] and mine["finish"] == theirs["finish"]


def judge(tmp_path: Path, families: list[str], ranks: int, transport: str) -> None:
    one = compute(tmp_path / "one", families, 1)[0]
    several = compute(tmp_path / "several", families, ranks, transport)
    for family in families:
        for rank in several[1:]:
            assert rank[family] == several[0][family]  # tokens, log-probabilities, digest
        close(one[family]["events"], several[0][family]["events"])


def test_two_processes_are_as_one(tmp_path: Path):
    judge(tmp_path, ["llama"], 2, "shm")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_processes_are_as_one(tmp_path: Path, family: str, ranks: int):
    judge(tmp_path, [family], ranks, "shm")


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "xla"])
def test_six_processes_are_as_one(tmp_path: Path, transport: str):
    judge(tmp_path, ["qwen3"], 6, transport)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_processes_over_gloo_are_as_one(tmp_path: Path, family: str):
    judge(tmp_path, [family], 2, "xla")
