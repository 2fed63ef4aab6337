"""`shm`: numbers against numpy, waits that end, calls that do not match."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from shm_ranks import SHAPES, digest, payload

HERE = Path(__file__).resolve().parent


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], autouse=True)
def platform(request, monkeypatch) -> str:
    """Where the ranks compute; those of one GPU share it in turns."""
    monkeypatch.setenv("SHM_PLATFORM", request.param)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    return request.param


def world(ranks: int, mode: str) -> list[subprocess.Popen]:
    name = f"sparkjax-test-{secrets.token_hex(6)}"
    environ = {**os.environ, "PYTHONPATH": str(HERE.parent.parent)}
    return [
        subprocess.Popen(
            [sys.executable, str(HERE / "shm_ranks.py"), name, str(rank), str(ranks), mode],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ,
        )
        for rank in range(ranks)
    ]  # fmt: skip


def ordered_sum(terms: list[np.ndarray]) -> np.ndarray:
    total = terms[0].astype(np.float32)
    for term in terms[1:]:
        total = total + term.astype(np.float32)
    return np.asarray(jnp.asarray(total).astype(terms[0].dtype))


@pytest.mark.parametrize("ranks", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 6))])
def test_every_collective_gives_the_numbers_of_numpy_on_every_rank(ranks: int):
    """The first exchange's number wraps on the way, and arrays take several exchanges."""
    processes = world(ranks, "numbers")
    found = [json.loads(p.communicate(timeout=120)[0]) for p in processes]
    assert all(f["scan"] == found[0]["scan"] for f in found)
    for at, (shape, dtype) in enumerate(SHAPES):
        mine = [payload(rank, shape, dtype, at) for rank in range(ranks)]
        for rank in range(ranks):
            assert found[rank][f"reduce {at}"] == digest(ordered_sum(mine))
            assert found[rank][f"gather {at}"] == digest(np.concatenate(mine, axis=0))
            assert found[rank][f"broadcast {at}"] == digest(mine[-1])
            parts = [payload(r * 100 + rank, shape, dtype, at) for r in range(ranks)]
            assert found[rank][f"exchange {at}"] == digest(np.stack(parts))


def started(ranks: int, mode: str) -> list[subprocess.Popen]:
    processes = world(ranks, mode)
    for p in processes:
        assert p.stdout.readline() == "joined\n"
    for p in processes:
        p.stdin.write("go\n")
        p.stdin.flush()
    return processes


def test_a_rank_that_stands_still_is_named_and_nobody_waits_for_ever():
    processes = started(2, "stop")
    try:
        said = processes[0].communicate(timeout=60)[0]
        assert "all_reduce number 1 of rank 0 (16 bytes): rank 1 did not come in" in said
    finally:
        processes[1].kill()


@pytest.mark.slow
def test_calls_that_do_not_match_are_named_on_all_ranks():
    said = [p.communicate(timeout=60)[0] for p in started(2, "kind")]
    assert said[0] == said[1]
    assert "all_gather number 1 of 16 bytes" in said[0]
    assert "all_reduce number 1 of 16 bytes" in said[0]
