"""Bytes that are no requests: the server stays up, and whoever is being served notices nothing."""

from __future__ import annotations

import contextlib
import json
import logging
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import pytest

from sparkjax.api.connection import HEAD_BYTES, Connection

from . import fake_engine
from .conftest import Socket

BODY = json.dumps({"model": "toy", "max_tokens": 3, "messages": [{"role": "user", "content": "hé"}]}).encode()
PATHS = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/score",
    "/tokenize", "/health", "/v1/responses/resp_x/cancel", "/", "/metrics", "/nothing",
)  # fmt: skip


def request(path: str = PATHS[0], body: bytes = BODY, *headers: str, method: str = "POST") -> bytes:
    """A well-formed request."""
    head = [f"{method} {path} HTTP/1.1", "Host: x", "Content-Type: application/json", *headers]
    if not any(h.lower().startswith(("content-length", "transfer-encoding")) for h in headers):
        head.append(f"Content-Length: {len(body)}")
    return "\r\n".join(head).encode("latin-1") + b"\r\n\r\n" + body


def chunked(rng: random.Random, *, broken: bool) -> bytes:
    """A chunked request; broken: one size is a lie."""
    out, at = b"", 0
    while at < len(BODY):
        size = rng.randint(1, 40)
        piece = BODY[at : at + size]
        said = f"{len(piece):x}"
        if broken and rng.random() < 0.4:
            said = rng.choice(["", "-1", "zz", "f" * 19, "f" * 40, "7fffffffffffffff", f"{len(piece) + 3:x}", "0x5", " 5"])
        out += said.encode() + rng.choice([b"", b";ext=1", b';x="' + b"y" * 50 + b'"']) + b"\r\n" + piece + b"\r\n"
        at += size
    return request(PATHS[0], out + b"0\r\n\r\n", "Transfer-Encoding: chunked")


LENGTHS = ("-1", "1e3", "99999999999999999999", "0", "3", "+5", "5, 6", "", "0x10", "４")


def strange(rng: random.Random) -> bytes:
    """Something that somebody could send."""
    kinds: list[Callable[[], bytes]] = [
        lambda: rng.randbytes(rng.randint(1, 3000)),
        lambda: chunked(rng, broken=False),
        lambda: chunked(rng, broken=True),
        lambda: request(PATHS[0], BODY, f"Content-Length: {rng.choice(LENGTHS)}".encode().decode("latin-1")),
        lambda: request(PATHS[0], BODY, "Content-Length: 5", "Content-Length: 6"),
        lambda: request(PATHS[0], BODY, f"Content-Length: {len(BODY)}", "Transfer-Encoding: chunked"),
        lambda: request(PATHS[0], BODY, "Transfer-Encoding: gzip, chunked"),
        lambda: request(PATHS[0], BODY, "Content-Encoding: gzip"),
        lambda: request(PATHS[0], BODY, "Expect: 100-continue"),
        lambda: request(PATHS[0], BODY, "Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Key: x"),
        lambda: request(PATHS[0], BODY, "X: " + "y" * rng.choice([10_000, HEAD_BYTES, 200_000])),
        lambda: request(PATHS[0], BODY, *(f"X-{i}: y" for i in range(rng.choice([50, 3000])))),
        lambda: request(PATHS[0], BODY, "no colon here"),
        lambda: request(PATHS[0], BODY, "X: a\x00b"),
        lambda: request(PATHS[0], BODY, "X: a\r\n folded"),
        lambda: request(PATHS[0], BODY, "X-Request-Id: " + "\xff" * 20),
        lambda: request(rng.choice(["/%ff%fe", "/v1/models/%00", "/v1/models/" + "a" * 9000, "/../../etc/passwd",
                                    "http://other/health", "//health", "*", "/?" + "a=" * 500])),
        lambda: request(rng.choice(PATHS), rng.randbytes(rng.randint(0, 400))),
        lambda: request(rng.choice(PATHS), b'{"model": "toy", "input": "\xff\xfe\xed\xa0\x80"}'),
        lambda: request(rng.choice(PATHS), b'{"model": "\\ud800", "messages": "\\ud83d"}'),
        lambda: request(rng.choice(PATHS), b"[" * rng.choice([70, 5000, 200_000])),
        lambda: request(rng.choice(PATHS), b'{"model": ' + b"9" * rng.choice([400, 50_000]) + b"}"),
        lambda: request(rng.choice(PATHS), BODY, method=rng.choice(["GET", "PUT", "BREW", "CONNECT", "x" * 300])),
        lambda: request() * rng.randint(2, 12),
        lambda: request() + b"garbage in the middle of an answer\r\n\r\n",
        lambda: request(PATHS[0], BODY.replace(b'"toy"', b'"toy", "stream": true')) + rng.randbytes(200),
        lambda: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + rng.randbytes(30),
        lambda: bytes.fromhex("16030100c8010000c40303") + rng.randbytes(190),
        lambda: b"GET /health\r\n\r\n",
        lambda: b"GET /health HTTP/1.0\n\n",
        lambda: b"\r\n" * rng.randint(1, 2000),
    ]  # fmt: skip
    data = bytearray(rng.choice(kinds)())
    if rng.random() < 0.3:
        for _ in range(rng.randint(1, 8)):
            place = rng.randrange(len(data))
            match rng.randrange(3):
                case 0:
                    data[place] = rng.randrange(256)
                case 1:
                    del data[place : place + rng.randint(1, 30)]
                case _:
                    data[place:place] = rng.randbytes(rng.randint(1, 9))
            if not data:
                break
    return bytes(data)


def connect(server: Socket) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", server.sock.getsockname()[1]))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.settimeout(3)
    return sock


def talk(server: Socket, data: bytes, rng: random.Random) -> bytes:
    """Sends bytes in random pieces, and returns what comes back until the server is silent."""
    with connect(server) as sock, contextlib.suppress(OSError):
        at = 0
        while at < len(data):
            size = rng.choice([1, 7, 100, 4096, 1 << 20])
            sock.sendall(data[at : at + size])
            at += size
            if at > 200 and size < 50:  # the head was cut finely enough
                sock.sendall(data[at:])
                break
        if rng.random() < 0.2:
            return b""  # leaves without a word
        if rng.random() < 0.8:
            sock.shutdown(socket.SHUT_WR)
        else:
            sock.settimeout(0.3)
        found = b""
        while True:
            try:
                part = sock.recv(65536)
            except TimeoutError:
                return found
            if not part:
                return found
            found += part
    return b""


@contextlib.contextmanager
def bystander(server: Socket) -> Iterator[None]:
    """A client whose stream runs meanwhile, again and again, and must always be whole."""
    stop, problems, count = threading.Event(), [], [0]

    def listen() -> None:
        body = {"model": "toy", "prompt": "bystander", "max_tokens": 60, "temperature": 0, "stream": True}
        expected = None
        with httpx.Client(base_url=server.url, timeout=30) as client:
            while not stop.is_set() or not count[0]:
                try:
                    raw = client.post("/v1/completions", json=body).text
                    lines = [line[6:] for line in raw.splitlines() if line.startswith("data: {")]
                    text = "".join(c["text"] for line in lines for c in json.loads(line)["choices"])
                    assert raw.endswith("data: [DONE]\n\n") and len(text) == 60
                    assert expected in (None, text)
                    expected = text
                    count[0] += 1
                except Exception as error:
                    problems.append(repr(error))
                    return

    thread = threading.Thread(target=listen)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(60)
    assert problems == [] and count[0]


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not settle"
        time.sleep(0.01)


@pytest.mark.parametrize("count, seed", [(120, 1), pytest.param(4000, 2, marks=pytest.mark.slow)])
def test_random_bytes_disturb_nobody(make_socket, caplog, count, seed):
    server = make_socket()
    rng = random.Random(seed)
    statuses = set()
    with caplog.at_level(logging.ERROR), bystander(server):
        for _ in range(count):
            data = strange(rng)
            found = talk(server, data, rng)
            if found:
                assert found.startswith(b"HTTP/1.1 "), (data[:300], found[:300])
                statuses.add(int(found[9:12]))
    assert not [status for status in statuses if status == 500 or status > 503], statuses
    assert {200, 400, 404} <= statuses
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok", "model": "toy"}
    server.api.engine.wait_idle()
    until(lambda: len(server.server.server_state.connections) <= 1)


def test_garbage_behind_a_request_ends_only_its_own_connection(make_socket, caplog):
    server = make_socket(script=fake_engine.babble)
    server.api.core.step_seconds = 0.01
    body = BODY.replace(b'"max_tokens": 3', b'"max_tokens": 400').replace(b'"toy"', b'"toy", "stream": true')
    with bystander(server), connect(server) as sock:
        sock.sendall(request(body=body))
        assert sock.recv(4096).startswith(b"HTTP/1.1 200")
        sock.sendall(b"\x00garbage\r\n\r\n" * 20)
    server.api.engine.wait_idle(10)
    assert [r for r in caplog.records if r.levelno >= logging.ERROR] == []


def test_a_connection_that_asks_nothing_is_closed(make_socket, monkeypatch):
    monkeypatch.setattr(Connection, "head_seconds", 0.3)
    server = make_socket()
    for begun in (b"", b"POST /v1/chat/completions HTTP/1.1\r\nHo"):
        with connect(server) as sock:
            sock.sendall(begun)
            found = sock.recv(4096)
            assert found.startswith(b"HTTP/1.1 408"), found
            assert json.loads(found.partition(b"\r\n\r\n")[2])["error"]["message"].startswith("no request")
            assert sock.recv(10) == b""


def test_one_byte_after_the_other_does_not_keep_a_connection(make_socket, monkeypatch):
    monkeypatch.setattr(Connection, "head_seconds", 0.4)
    server = make_socket()
    with bystander(server), connect(server) as sock, pytest.raises(OSError):
        for byte in request() * 100:  # never as fast as a head should come
            sock.sendall(bytes([byte]))
            time.sleep(0.02)
    until(lambda: len(server.server.server_state.connections) <= 1)
    # A second request that never ends, after a good first one.
    with connect(server) as sock:
        sock.sendall(request() + b"POST /v1/chat")
        found = b""
        with contextlib.suppress(ConnectionResetError):
            while part := sock.recv(65536):
                found += part
        assert found.startswith(b"HTTP/1.1 200")


def test_what_is_no_http_is_told_in_json(make_socket):
    server = make_socket()
    with connect(server) as sock:
        sock.sendall(b"SSH-2.0-OpenSSH_9.0\r\n\r\n")
        head, _, body = sock.recv(4096).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400") and json.loads(body)["error"]["code"] == "invalid_http"


def test_a_body_that_breaks_off_in_nonsense_is_answered_once(make_socket, caplog):
    """The head alone starts the handler, which must not answer beside the 400."""
    server = make_socket()
    for _ in range(20):
        with connect(server) as sock:
            sock.sendall(request(PATHS[0], b"zz\r\nnonsense\r\n", "Transfer-Encoding: chunked"))
            found = b""
            with contextlib.suppress(ConnectionResetError):
                while part := sock.recv(4096):
                    found += part
            assert found.startswith(b"HTTP/1.1 400") and found.count(b"\r\n\r\n") == 1
    assert [r for r in caplog.records if r.levelno >= logging.ERROR] == []
