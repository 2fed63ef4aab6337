"""Processes that share one GPU, which they have in turns, serve what one process serves."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import httpx
import pytest
from served_world import served

from sparkjax.engine.compare import compare_logs

pytestmark = pytest.mark.gpu
PROMPTS = ["hello", "once upon a time", "x" * 100, "the quick brown fox"]


def answers(folder: Path, ranks: int) -> list[dict]:
    """Greedy answers with their log-probabilities, as served by so many ranks."""
    with served(folder, ranks, "shm", "model.dtype=float32", platform="cuda") as world:
        found = [
            world.complete(prompt, 24, logprobs=1, ignore_eos=True).json()["choices"][0]
            for prompt in PROMPTS
        ]
        metrics = httpx.get(f"{world.url}/metrics").text
        assert re.search(r"^sparkjax:compilations_total\{.*\} 0\.0$", metrics, re.M), metrics
        world.processes[0].send_signal(signal.SIGTERM)
        assert set(world.codes().values()) == {0}, world.logs()
        if ranks > 1:
            report = compare_logs(*(folder / f"journal.rank{rank}" for rank in range(ranks)))
            assert report.same and report.longer == 0, report
    return found


def test_two_processes_on_a_gpu_serve_what_one_does(tmp_path: Path):
    one, two = (answers(tmp_path / str(ranks), ranks) for ranks in (1, 2))
    for mine, theirs in zip(one, two, strict=True):
        assert mine["text"] == theirs["text"]
        for a, b in zip(
            mine["logprobs"]["token_logprobs"], theirs["logprobs"]["token_logprobs"], strict=True
        ):
            assert abs(a - b) < 2e-3
    print(json.dumps([choice["text"] for choice in two]))
