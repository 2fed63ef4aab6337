"""What happens when a rank dies, stands still, is told to stop or does not agree."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from cable import Cable, cable
from served_world import START_SECONDS, Served, served

from sparkjax.engine.compare import compare_logs

BOUND = {"kill": 5.0, "stop": 10.0, "cut": 10.0}
"""Seconds from a rank's death, standstill or lost cable to the end of all ranks."""
GRACE = 8.0
"""What is allowed beyond where this machine has more to do than it has processors."""
PATIENT = "mesh.silence_seconds=60"
"""Where no rank is lost: a busy machine may let a process wait for longer than a lost one is given."""
RECEIPTS = Path(__file__).resolve().parents[2] / ".cache" / "drills.jsonl"
"""How long each drill has taken, a line a drill."""


def harm(world: Served, rank: int, what: str) -> float:
    """Lets something happen to a rank. Returns when."""
    if what == "cut":
        world.cable.pull()
    else:
        number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[what]
        world.processes[rank].send_signal(number)
    return time.monotonic()


def note(world: Served, rank: int, what: str, phase: str, begun: float) -> None:
    """All have ended, and in time."""
    took = time.monotonic() - begun
    line = {
        "drill": what, "rank": rank, "of": world.ranks, "phase": phase,
        "transport": world.transport, "seconds": round(took, 2), "load": os.getloadavg()[0],
    }  # fmt: skip
    RECEIPTS.parent.mkdir(exist_ok=True)
    with RECEIPTS.open("a") as file:
        file.write(json.dumps(line) + "\n")
    busy = os.getloadavg()[0] > (os.cpu_count() or 1)
    assert took < BOUND[what] + (GRACE if busy else 0), f"{line}\n{world.logs()}"


def lost(world: Served, rank: int, what: str, begun: float, phase: str) -> None:
    """All ranks that live end in time, with the codes and the words that say which one was lost."""
    ending = {r: p for r, p in world.processes.items() if r != rank or what == "cut"}
    codes = {r: world.wait(r, 60) for r in ending}
    note(world, rank, what, phase, begun)
    assert codes == {r: 2 if r == 0 else 3 for r in ending}, world.logs()
    for r in ending:
        # Of a cut cable each side blames the other.
        gone = 1 - r if what == "cut" else rank
        assert f"rank {gone} (" in world.log(r).read_text(), world.logs()


def drill(world: Served, rank: int, what: str, phase: str = "decode") -> None:
    """Something happens to a rank while a stream runs."""
    prompt = "hello" if phase == "decode" else "x" * 500
    whole = world.complete("hello", 40, ignore_eos=True).json()["choices"][0]["text"]
    text, error = "", None
    with world.stream(prompt, 490 if phase == "decode" else 8) as events:
        if phase == "decode":
            text = next(events)["choices"][0]["text"]
        begun = harm(world, rank, what)
        for event in events if rank or what == "cut" else ():
            if "error" in event:
                error = event["error"]
                break
            text += event["choices"][0]["text"]
    lost(world, rank, what, begun, phase)
    if error is not None:
        assert error["code"] == "engine_failure" and f"rank {rank or 1} (" in error["message"]
    # A prefill may have ended before its rank did.
    assert error is not None or phase == "prefill" or (rank == 0 and what != "cut")
    if phase == "decode":
        # What was sent is the beginning of what a whole answer is.
        assert whole.startswith(text[: len(whole)]) or text.startswith(whole)


def again(world: Served) -> None:
    """The same world started again serves the next request."""
    world.end()
    for r in range(world.ranks):
        world.start(r)
    world.wait_ready()
    assert world.complete("hello", 4).json()["usage"]["completion_tokens"] == 4


@pytest.mark.slow
def test_a_rank_is_killed_while_it_decodes(tmp_path: Path):
    """The short drill. The world answers, takes garbage without harm, then loses a rank; the
    decision logs of both ranks survive and agree; started again, it serves."""
    with served(tmp_path, 2) as world:
        host, port = world.peers[0].split(":")
        for size in (0, 10, 3000):
            with socket.create_connection((host, int(port)), timeout=10) as sock:
                sock.sendall(random.Random(size).randbytes(size))
        drill(world, 1, "kill")
        logs = [tmp_path / f"journal.rank{rank}" for rank in (0, 1)]
        report = compare_logs(*logs)
        assert report.same and report.ticks > 40, report
        again(world)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("rank, what", [(0, "kill"), (1, "stop"), (0, "stop"), (2, "kill")])
def test_a_rank_is_lost_while_it_works(tmp_path: Path, rank: int, what: str, phase: str):
    with served(tmp_path, 3) as world:
        drill(world, rank, what, phase)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["kill", "stop"])
def test_a_rank_is_lost_over_gloo(tmp_path: Path, what: str):
    """After garbage for the port of JAX's own coordination, which does no harm."""
    with served(tmp_path, 2, "xla") as world:
        host, port = world.peers[0].split(":")
        strange = socket.create_connection((host, int(port) + 1), timeout=10)
        with strange as sock, contextlib.suppress(ConnectionError):
            sock.sendall(random.Random(1).randbytes(3000))
        drill(world, 1, what)


@pytest.fixture
def two_hosts() -> Iterator[Cable]:
    try:
        with cable() as made:
            yield made
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {error}")


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_the_cable_is_pulled(tmp_path: Path, two_hosts: Cable, phase: str):
    """Nothing ends and nothing is refused: there is silence."""
    with two_hosts.host(0), served(tmp_path, 2, cable=two_hosts) as world:
        drill(world, 1, "cut", phase)


@pytest.mark.slow
def test_the_cable_is_pulled_while_the_world_starts(tmp_path: Path, two_hosts: Cable):
    with two_hosts.host(0):
        world = Served(tmp_path, 2, cable=two_hosts)
        try:
            for rank in (0, 1):
                world.start(rank)
            until = time.monotonic() + 120
            while "memory:" not in world.log(1).read_text():  # they have met, and load
                assert time.monotonic() < until, world.logs()
                time.sleep(0.1)
            begun = harm(world, 1, "cut")
            codes = world.codes(120)
            note(world, 1, "cut", "start", begun)
            assert codes == {0: 1, 1: 3}, world.logs()
            for rank in (0, 1):
                assert f"rank {1 - rank} (" in world.log(rank).read_text()
        finally:
            world.end()


@pytest.mark.slow
@pytest.mark.parametrize("what", ["kill", "stop"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_is_lost_while_the_world_starts(tmp_path: Path, rank: int, what: str):
    """At random moments of the start: the other one ends within the bound, and the world comes
    again when both are started again."""
    world = Served(tmp_path, 2)
    try:
        for attempt, pause in enumerate((4.0, 8.0)):
            before = world.log(1 - rank).stat().st_size if attempt else 0
            for r in (0, 1):
                world.start(r, "mesh.join_seconds=30")
            time.sleep(pause)
            begun = harm(world, rank, what)
            other = 1 - rank
            try:
                code = world.wait(other, 150)
                # Before the two had met, the other one goes on waiting for mesh.join_seconds.
                said = world.log(other).read_text()[before:]
                met = f"rank {rank} (" in said
                if met:
                    note(world, rank, what, "start", begun)
            finally:
                world.processes[rank].kill()
                world.processes[rank].wait(30)
            # A quick machine's rank 0 may serve by then.
            serves = 2 if " is ready after " in said else 1
            assert code == ((3 if met else 1) if other else serves), (attempt, world.logs())
        for r in (0, 1):
            world.start(r)
        world.wait_ready()
        assert world.complete("hello", 4).status_code == 200
    finally:
        world.end()


@pytest.mark.slow
@pytest.mark.parametrize("told", [(0,), (1,), (0, 1), (1, 0)])
def test_ranks_that_are_told_to_stop_end_the_world_in_order(tmp_path: Path, told: tuple[int, ...]):
    with served(tmp_path, 2, "shm", PATIENT) as world, world.stream("hello", 200) as events:
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
@pytest.mark.parametrize("start", range(50))
def test_the_first_request_at_the_moment_of_readiness_after_a_late_rank(tmp_path: Path, start: int):
    """A client asks from the beginning, again and again: it is refused or told to wait until it is
    answered in full."""
    rng = random.Random(start)
    world = Served(tmp_path, 2)
    try:
        late = rng.randrange(2)
        world.start(1 - late, PATIENT)
        time.sleep(rng.uniform(0, 6))
        world.start(late, PATIENT)
        until = time.monotonic() + START_SECONDS
        while True:
            assert time.monotonic() < until, world.logs()
            for rank, process in world.processes.items():
                assert process.poll() is None, f"rank {rank} ended\n{world.logs()}"
            try:
                answer = world.complete("now", 3, ignore_eos=True)
            except httpx.ConnectError:
                time.sleep(0.01)
                continue
            if answer.status_code != 503:
                break
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 3
    finally:
        world.end()


@pytest.mark.slow
def test_two_hundred_requests_with_cancels_and_disconnects(tmp_path: Path):
    """Both ranks do the same to the last operation, nothing is compiled, and whoever stayed to the
    end got what is answered alone."""
    rng = random.Random(17)
    with served(tmp_path, 2, "shm", PATIENT) as world:
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
