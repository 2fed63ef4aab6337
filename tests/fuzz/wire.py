"""Sockets: bytes that are no requests, and requests that schemathesis makes of the description."""

from __future__ import annotations

import contextlib
import importlib.util
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import httpx

from tests.api.conftest import Api, Socket
from tests.api.test_bytes import bystander, strange, talk, until

from .texts import Check


@contextlib.contextmanager
def connections() -> Iterator[Check]:
    """Any bytes get an answer of HTTP/1.1 or none, and a stream beside them stays whole."""
    api = Api()
    server = Socket(api)

    def check(rng: random.Random) -> None:
        data = strange(rng)
        found = talk(server, data, rng)
        if found:
            assert found.startswith(b"HTTP/1.1 "), (data[:300], found[:300])
            status = int(found[9:12])
            assert status != 500 and status <= 503, (data[:300], found[:300])

    check.threads = 4  # type: ignore[attr-defined]
    with bystander(server):
        yield check
    assert httpx.get(f"{server.url}/health").json()["status"] == "ok"
    api.engine.wait_idle(10)
    until(lambda: len(server.server.server_state.connections) <= 1)
    server.close()
    api.close()


class _Counted:
    """An application that counts its requests."""

    def __init__(self, app: Any):
        self.app, self.state, self.count = app, app.state, 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.count += scope["type"] == "http"
        await self.app(scope, receive, send)


@contextlib.contextmanager
def described() -> Iterator[Check]:
    """Requests that the description allows and forbids: answers are as described."""
    api = Api()
    counted = api.app = _Counted(api.app)  # type: ignore[assignment]
    server = Socket(api)

    def whole(count: int, seed: int) -> tuple[int, list[str]]:
        if importlib.util.find_spec("schemathesis") is None:
            print("described: needs schemathesis", file=sys.stderr)
            return 0, []
        with tempfile.TemporaryDirectory() as folder:
            # Some 3,400 requests come for the first unit of --max-examples, fewer for further ones.
            done = subprocess.run(
                [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json",
                 "--exclude-checks", "positive_data_acceptance", "--exclude-path", "/admin/profile",
                 "--max-examples", str(max(count // 3400, 1)), "--seed", str(seed), "--no-color",
                 "--continue-on-failure"],
                cwd=folder, capture_output=True, text=True,
            )  # fmt: skip
        problems = [done.stdout[-6000:] + done.stderr[-2000:]] if done.returncode else []
        return counted.count, problems

    def check(rng: random.Random) -> None:
        raise NotImplementedError("schemathesis makes its own inputs")

    check.whole = whole  # type: ignore[attr-defined]
    yield check
    api.engine.wait_idle(10)
    server.close()
    api.close()
