"""Clients that leave: nothing is computed for them any more, and nobody else notices."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from . import fake_engine
from .conftest import Socket, Stream

LONG = {"model": "toy", "prompt": "x" * 200, "max_tokens": 300}
PATHS = {"/v1/completions": LONG, "/v1/chat/completions": {
    "model": "toy", "messages": [{"role": "user", "content": "x" * 150}], "max_tokens": 300}}  # fmt: skip


class Raw:
    """A client that can vanish at any moment."""

    def __init__(self, server: Socket, body: dict, path: str = "/v1/completions"):
        raw = json.dumps(body).encode()
        self.sock = socket.create_connection(server.sock.getsockname())
        self.sock.sendall(
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(raw)}\r\n\r\n".encode()
            + raw
        )

    def read_some(self) -> bytes:
        return self.sock.recv(4096)

    def vanish(self) -> None:
        self.sock.close()


def until(condition, seconds: float = 3.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture
def server(make_socket) -> Socket:
    made = make_socket()
    made.api.core.step_seconds = 0.01
    return made


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", PATHS)
def test_T47_a_client_that_leaves_during_decode_frees_everything(server, path, stream):
    engine = server.api.engine
    client = Raw(server, PATHS[path] | {"stream": stream}, path)
    if stream:
        assert b"text/event-stream" in client.read_some()
    until(lambda: engine.core.started and not engine.gauges().prefilling)
    client.vanish()
    until(lambda: engine.calls["cancel"] == 1, 1.0)
    ticks = engine.ticks
    engine.wait_idle(1.0)
    assert engine.ticks - ticks <= 3
    assert set(engine.ended.values()) == {"cancelled"}
    assert not server.api.front.jobs


@pytest.mark.parametrize("stream", [True, False])
def test_T47_a_client_that_leaves_during_prefill_frees_everything(server, stream):
    engine = server.api.engine
    engine.core.step_seconds = 0.05  # 500 tokens are 16 tiles
    client = Raw(server, {"model": "toy", "prompt": "x" * 500, "max_tokens": 5, "stream": stream})
    until(lambda: engine.core.started)
    client.vanish()
    until(lambda: engine.calls["cancel"] == 1, 1.0)
    engine.wait_idle(1.0)
    assert set(engine.ended.values()) == {"cancelled"}


@pytest.mark.parametrize("stream", [True, False])
def test_T47_a_client_that_leaves_the_queue_never_starts(server, stream):
    engine = server.api.engine
    busy = [Raw(server, LONG | {"stream": True}) for _ in range(4)]
    until(lambda: engine.gauges().running == 4)
    queued = Raw(server, LONG | {"stream": stream})
    until(lambda: engine.gauges().waiting == 1)
    last = engine.submitted[-1].id
    queued.vanish()
    until(lambda: engine.ended.get(last) == "cancelled", 1.0)
    assert last not in engine.core.started and engine.gauges().waiting == 0
    for client in busy:
        client.vanish()
    engine.wait_idle()


def test_T47_a_client_that_leaves_while_its_prompt_is_read_is_never_submitted(server):
    front, engine = server.api.front, server.api.engine
    release = threading.Event()
    workers = front._pool._max_workers
    for _ in range(workers):  # all readers of prompts are busy
        front._pool.submit(release.wait)
    client = Raw(server, LONG)
    until(lambda: front._pending == 1)
    client.vanish()
    until(lambda: front._pending == 0, 1.0)
    release.set()
    time.sleep(0.1)
    assert engine.calls["submit"] == 0


def test_T48_normal_completion_cancels_nothing(server):
    server.api.core.step_seconds = 0
    engine = server.api.engine
    with httpx.Client(base_url=server.url, timeout=30) as client, ThreadPoolExecutor(4) as pool:

        def one(i: int) -> bool:
            body = {"model": "toy", "prompt": f"{i}", "max_tokens": 1 + i % 9, "stream": i % 2 == 0}
            return client.post("/v1/completions", json=body | {"n": 1 + i % 3}).status_code == 200

        assert all(pool.map(one, range(60)))
    engine.wait_idle()
    assert engine.calls["cancel"] == 0 and engine.calls["stop"] == 0
    assert set(engine.ended.values()) == {"length"}


def test_T49_the_next_turn_after_a_cancelled_one_is_unaffected(server):
    engine = server.api.engine
    body = {"model": "toy", "messages": [{"role": "user", "content": "hello"}], "temperature": 0,
            "max_tokens": 30}  # fmt: skip
    with httpx.Client(base_url=server.url, timeout=30) as client:
        alone = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
        for _ in range(3):
            cancelled = Raw(
                server, body | {"stream": True, "max_tokens": 300}, "/v1/chat/completions"
            )
            assert cancelled.read_some()
            cancelled.vanish()
            again = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
            assert again == alone
    engine.wait_idle()


def test_thirty_clients_that_vanish_leave_nothing(make_socket):
    server = make_socket(limits=fake_engine.Limits(
        slots=4, pages=64, page_size=16, context=512, queue=40, tiles=(16, 32), rows=(2, 4)))  # fmt: skip
    engine = server.api.engine
    engine.core.step_seconds = 0.005
    clients = [Raw(server, LONG | {"stream": i % 2 == 0}) for i in range(30)]
    until(lambda: engine.calls["submit"] == 30)
    for client in clients:
        client.vanish()
    engine.wait_idle(3.0)
    until(lambda: not server.api.front.jobs)
    metrics = httpx.get(f"{server.url}/metrics").text
    assert 'vllm:num_requests_running{engine="0",model_name="toy"} 0.0' in metrics
    assert 'vllm:num_requests_waiting{engine="0",model_name="toy"} 0.0' in metrics
    assert (
        'request_success_total{engine="0",finished_reason="abort",model_name="toy"} 30.0' in metrics
    )


def test_a_client_that_does_not_read_still_gets_its_stop_told(make_socket):
    server = make_socket(script=fake_engine.speak("ABC STOP" + "x" * 400, end=False))
    engine = server.api.engine
    client = Raw(server, LONG | {"stream": True, "stop": "STOP"})
    until(lambda: engine.calls["stop"] == 1)
    engine.wait_idle()
    client.vanish()


def test_a_slow_reader_gets_everything(make_socket):
    server = make_socket()
    text = []
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json=LONG | {"stream": True}
    ) as response:
        for i, line in enumerate(response.iter_lines()):
            if i < 5:
                time.sleep(0.05)
            text.append(line)
    response._content = "\n\n".join(filter(None, text)).encode()
    assert len(Stream(response).text()) == 300
