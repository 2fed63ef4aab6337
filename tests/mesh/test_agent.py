"""Agents start, watch, restart and stop ranks; the verbs of the command go through them."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sparkjax import agent as agents
from sparkjax.agent import Agent, AgentError, ask
from sparkjax.cli.app import app
from sparkjax.config import load

RANK = """
import signal, sys, time
print("rank", sys.argv[sys.argv.index("--rank") + 1], "runs", flush=True)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
while True:
    time.sleep(0.05)
"""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def eventually(what: Callable[[], Any], seconds: float = 30.0) -> Any:
    until = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < until
        threading.Event().wait(0.02)
    return found


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch) -> Path:
    """Two ranks on this machine; nothing is written outside of the test's folder."""
    monkeypatch.setattr(agents, "folder_of", lambda config: tmp_path / "state")
    path = tmp_path / "tp2.yaml"
    path.write_text(
        "mesh:\n  peers: [127.0.0.1:1, 127.0.0.1:2]\n  tensor_parallel: 2\n"
        f"  transport: shm\n  agent_port: {free_port()}\n"
    )
    return path


@contextlib.contextmanager
def running(path: Path, script: str = RANK) -> Iterator[Agent]:
    made = Agent(path, (sys.executable, "-c", script))
    thread = threading.Thread(target=made.run)
    thread.start()
    config = load(path)
    try:
        eventually(lambda: answers(config))
        yield made
    finally:
        made._quit.set()
        thread.join(60)


def answers(config: Any) -> Any:
    with contextlib.suppress(AgentError):
        return ask(config, "127.0.0.1", "status")


def states(config: Any) -> list[str]:
    return [r["state"] for r in ask(config, "127.0.0.1", "status")]


def test_ranks_are_started_restarted_after_a_crash_and_stopped(recipe: Path):
    config = load(recipe)
    with running(recipe):
        assert states(config) == ["stopped", "stopped"]
        ask(config, "127.0.0.1", "up")
        eventually(lambda: states(config) == ["running", "running"])
        first = ask(config, "127.0.0.1", "status")
        eventually(lambda: all(ask(config, "127.0.0.1", "logs", 5).values()))
        assert ask(config, "127.0.0.1", "logs", 5) == {"0": ["rank 0 runs"], "1": ["rank 1 runs"]}
        agents.os.kill(first[1]["pid"], signal.SIGKILL)
        again = eventually(
            lambda: [
                r
                for r in ask(config, "127.0.0.1", "status")
                if r["rank"] == 1 and r["failures"] == 1 and r["state"] == "running"
            ]
        )
        assert again[0]["pid"] != first[1]["pid"]
        down = ask(config, "127.0.0.1", "down")
        assert [r["state"] for r in down] == ["stopped", "stopped"]
        assert states(config) == ["stopped", "stopped"]


def test_a_rank_that_always_fails_is_given_up(recipe: Path, monkeypatch):
    monkeypatch.setattr(agents, "MOST_FAILURES", 2)
    config = load(recipe)
    with running(recipe, "import sys; sys.exit(1)"):
        ask(config, "127.0.0.1", "up")
        eventually(lambda: states(config) == ["failed", "failed"])
        status = ask(config, "127.0.0.1", "status")
        assert [(r["exit_code"], r["failures"]) for r in status] == [(1, 2)] * 2


def test_an_agent_outlives_a_start_that_fails(recipe: Path, monkeypatch):
    """Ranks run on without anybody to stop them if it does not."""
    monkeypatch.setattr(agents, "MOST_FAILURES", 1)
    config = load(recipe)
    with running(recipe) as agent:
        agent.folder.rmdir()
        agent._command = ("/nonexistent",)
        ask(config, "127.0.0.1", "up")
        eventually(lambda: states(config) == ["failed", "failed"])
        agent._command = (sys.executable, "-c", RANK)
        agent.folder.rename(agent.folder.with_name("gone"))
        ask(config, "127.0.0.1", "up")
        eventually(lambda: states(config) == ["running", "running"])


def test_an_orderly_end_is_no_failure(recipe: Path):
    config = load(recipe)
    with running(recipe, "print('done')"):
        ask(config, "127.0.0.1", "up")
        eventually(
            lambda: (
                [(r["state"], r["exit_code"]) for r in ask(config, "127.0.0.1", "status")]
                == [("stopped", 0)] * 2
            )
        )


def test_strangers_and_unknown_verbs_do_no_harm(recipe: Path):
    config = load(recipe)
    rng = random.Random(7)
    with running(recipe):
        for size in (0, 1, 48, 5000):
            where = ("127.0.0.1", config.mesh.agent_port)
            with socket.create_connection(where, timeout=10) as sock:
                sock.sendall(rng.randbytes(size))
        with pytest.raises(AgentError, match=r"unknown verb 'rm -rf'; there are up, down"):
            ask(config, "127.0.0.1", "rm -rf")
        assert states(config) == ["stopped", "stopped"]


def test_the_verbs_drive_the_ranks(recipe: Path):
    runner = CliRunner()
    config = load(recipe)

    def verb(*arguments: str) -> Any:
        return runner.invoke(app, [arguments[0], "-c", str(recipe), *arguments[1:]])

    found = verb("status")
    assert found.exit_code == 1 and "no agent at 127.0.0.1" in found.output
    with running(recipe):
        found = verb("up", "--wait", "0")
        assert found.exit_code == 0 and "rank 0  127.0.0.1" in found.output, found.output
        eventually(lambda: states(config) == ["running", "running"])
        found = verb("status", "--json")
        assert [r["rank"] for r in json.loads(found.output)["127.0.0.1"]] == [0, 1]
        found = verb("health")
        assert found.exit_code == 1 and "not ready" in found.output  # these ranks answer nobody
        eventually(lambda: "rank 1 runs" in verb("logs").output)
        assert "rank 0 runs" not in verb("logs", "--rank", "1").output
        found = verb("restart", "--wait", "0")
        assert found.exit_code == 0, found.output
        eventually(lambda: states(config) == ["running", "running"])
        found = verb("down")
        assert found.exit_code == 0 and found.output.count("stopped") == 2, found.output


def test_hosts_and_their_ranks():
    two = ["mesh.peers=10.0.0.1,10.0.0.2,10.0.0.1:5,127.0.0.1", "mesh.tensor_parallel=4"]
    config = load(overrides=two, environ={})
    assert agents.hosts(config) == {"10.0.0.1": [0, 2], "10.0.0.2": [1], "127.0.0.1": [3]}
    assert agents.hosts(load(environ={})) == {"127.0.0.1": [0]}
    assert agents.own_host(config) == "127.0.0.1"
