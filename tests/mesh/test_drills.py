"""What happens when a rank dies, stands still, is told to stop or does not agree."""

from __future__ import annotations

import random
import re
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from served_world import Served, served

from sparkjax.engine.compare import compare_logs

KILLED, STOPPED = 5.0, 10.0
"""Seconds from a rank's death, and from its standstill, to the end of all ranks."""
GRACE = 8.0
"""What the tests allow beyond: this machine may be busy with other things."""


def drill(world: Served, rank: int, number: int, bound: float) -> None:
    """Something happens to a rank while a stream runs."""
    whole = world.complete("hello", 40, ignore_eos=True).json()["choices"][0]["text"]
    with world.stream("hello", 490) as events:
        text = next(events)["choices"][0]["text"]
        world.processes[rank].send_signal(number)
        begun = time.monotonic()
        error = None
        for event in events if rank else ():
            if "error" in event:
                error = event["error"]
                break
            text += event["choices"][0]["text"]
    others = [r for r in world.processes if r != rank]
    codes = {r: world.wait(r, 60) for r in others}
    took = time.monotonic() - begun
    assert took < bound + GRACE, f"{took:.1f} s\n{world.logs()}"
    assert codes == {r: 2 if r == 0 else 3 for r in others}, world.logs()
    for r in others:
        assert f"rank {rank} (" in world.log(r).read_text(), world.logs()
    if rank:
        assert error is not None and error["code"] == "engine_failure"
        assert f"rank {rank} (" in error["message"]
        # What was sent is the beginning of what a whole answer is.
        assert whole.startswith(text[: len(whole)]) or text.startswith(whole)


@pytest.mark.slow
def test_a_rank_is_killed_while_it_decodes(tmp_path: Path):
    """The short drill. The world answers, takes garbage without harm, then loses a rank; the
    decision logs of both ranks survive and agree."""
    with served(tmp_path, 2) as world:
        host, port = world.peers[0].split(":")
        for size in (0, 10, 3000):
            with socket.create_connection((host, int(port)), timeout=10) as sock:
                sock.sendall(random.Random(size).randbytes(size))
        drill(world, 1, signal.SIGKILL, KILLED)
        logs = [tmp_path / f"journal.rank{rank}" for rank in (0, 1)]
        report = compare_logs(*logs)
        assert report.same and report.ticks > 40, report


@pytest.mark.slow
@pytest.mark.parametrize(
    "rank, number, bound",
    [
        (0, signal.SIGKILL, KILLED),
        (1, signal.SIGSTOP, STOPPED),
        (0, signal.SIGSTOP, STOPPED),
        (2, signal.SIGKILL, KILLED),
    ],
)
def test_a_rank_is_lost_while_it_decodes(tmp_path: Path, rank: int, number: int, bound: float):
    with served(tmp_path, 3) as world:
        drill(world, rank, number, bound)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_is_lost_over_gloo(tmp_path: Path, number: int):
    with served(tmp_path, 2, "xla") as world:
        drill(world, 1, number, STOPPED)


@pytest.mark.slow
def test_a_rank_is_lost_while_it_prefills(tmp_path: Path):
    with served(tmp_path, 2) as world, world.stream("x" * 500, 4) as events:
        world.processes[1].kill()
        begun = time.monotonic()
        assert any("error" in event for event in events) or world.wait(0) == 2
        assert world.wait(0) == 2
        assert time.monotonic() - begun < KILLED + GRACE


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_is_lost_while_the_world_starts(tmp_path: Path, rank: int, number: int):
    """At random moments of the start: the other one ends within the bound, and the world comes
    again when both are started again."""
    world = Served(tmp_path, 2)
    try:
        for attempt, pause in enumerate((4.0, 8.0)):
            for r in (0, 1):
                world.start(r, "mesh.join_seconds=30")
            time.sleep(pause)
            world.processes[rank].send_signal(number)
            begun = time.monotonic()
            bound = KILLED if number == signal.SIGKILL else STOPPED
            other = 1 - rank
            try:
                code = world.wait(other, bound + GRACE + 120)
            finally:
                world.processes[rank].kill()
                world.processes[rank].wait(30)
            # Before the two had met, the other one goes on waiting for mesh.join_seconds.
            met = f"rank {rank} (" in world.log(other).read_text()
            if met:
                assert time.monotonic() - begun < bound + GRACE, world.logs()
            assert code == (3 if other and met else 1), (attempt, world.logs())
        for r in (0, 1):
            world.start(r)
        world.wait_ready()
        assert world.complete("hello", 4).status_code == 200
    finally:
        world.end()


@pytest.mark.slow
@pytest.mark.parametrize("told", [(0,), (1,), (0, 1), (1, 0)])
def test_ranks_that_are_told_to_stop_end_the_world_in_order(tmp_path: Path, told: tuple[int, ...]):
    with served(tmp_path, 2) as world, world.stream("hello", 200) as events:
        next(events)
        for rank in told:
            world.processes[rank].send_signal(signal.SIGTERM)
        assert [e for e in events if "error" in e] == []
        assert world.codes() == {0: 0, 1: 0}, world.logs()


DIFFERENT = {
    "config engine.slots": ["engine.slots=5"],
    "config engine.tiles": ["engine.tiles=[16]"],
    "config kernels.linear": ["kernels.linear=reference"],
    "config model.dtype": ["model.dtype=bfloat16"],
}


@pytest.mark.slow
@pytest.mark.parametrize("field", [*DIFFERENT, "model model.safetensors", "model config.json"])
def test_ranks_that_differ_are_refused_by_field(tmp_path: Path, field: str):
    world = Served(tmp_path, 2)
    sets = list(DIFFERENT.get(field, []))
    if field.startswith("model "):
        other = Served(tmp_path / "other", 2).model
        file = other / field.removeprefix("model ")
        file.write_bytes(file.read_bytes() + b" ")
        sets = [f"model.path={other}", "model.name=tiny"]
    try:
        world.start(0)
        world.start(1, *sets)
        assert world.codes(120) == {0: 1, 1: 1}, world.logs()
        for rank in (0, 1):
            said = world.log(rank).read_text()
            assert f"{field} differs: rank 0: " in said and "rank 1: " in said
            assert "loading" not in said  # no weight was read
    finally:
        world.end()


@pytest.mark.slow
def test_the_first_request_at_the_moment_of_readiness_after_a_late_rank(tmp_path: Path):
    rng = random.Random(3)
    world = Served(tmp_path, 2)
    try:
        late = rng.randrange(2)
        world.start(1 - late)
        time.sleep(rng.uniform(2, 6))
        world.start(late)
        world.wait_ready()
        assert world.complete("now", 3).json()["usage"]["completion_tokens"] == 3
    finally:
        world.end()


@pytest.mark.slow
def test_two_hundred_requests_with_cancels_and_disconnects(tmp_path: Path):
    """Both ranks do the same to the last operation, nothing is compiled, and whoever stayed to the
    end got what is answered alone."""
    rng = random.Random(17)
    with served(tmp_path, 2) as world:
        prompts = [f"{word} {n}" for n in range(10) for word in ("hello", "once upon a time")]

        def alone(prompt: str) -> str:
            return world.complete(prompt, 12).json()["choices"][0]["text"]

        expected = {prompt: alone(prompt) for prompt in prompts}
        plans = [(rng.choice(prompts), rng.random(), rng.randrange(1, 10)) for _ in range(200)]

        def one(plan: tuple[str, float, int]) -> None:
            prompt, luck, events = plan
            if luck < 0.3:  # leaves after some events
                with world.stream(prompt, 200) as stream:
                    for _, _ in zip(range(events), stream, strict=False):
                        pass
            elif luck < 0.4:  # leaves before the first
                with socket.create_connection(("127.0.0.1", world.http)) as sock:
                    sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Le")
            else:
                answer = world.complete(prompt, 12)
                while answer.status_code == 503:  # as many wait as may
                    answer = world.complete(prompt, 12)
                assert answer.json()["choices"][0]["text"] == expected[prompt]

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(one, plans))
        metrics = httpx.get(f"{world.url}/metrics").text
        assert re.search(r"^sparkjax:compilations_total\{.*\} 0\.0$", metrics, re.M), metrics
        world.processes[0].send_signal(signal.SIGTERM)
        assert world.codes() == {0: 0, 1: 0}, world.logs()
        report = compare_logs(*(tmp_path / f"journal.rank{rank}" for rank in (0, 1)))
        assert report.same and report.longer == 0 and report.ticks > 200, report
