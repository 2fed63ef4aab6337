"""An app over a fake engine, and clients for it."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import uvicorn

from sparkjax.api.app import create_app
from sparkjax.api.connection import uvicorn_config
from sparkjax.settings import Http, Log

from . import fake_engine, toy


class Stream:
    """A finished stream: its events, and what a client makes of them."""

    def __init__(self, response: httpx.Response):
        self.response, self.raw = response, response.text
        lines = [line for line in self.raw.split("\n\n") if line]
        self.comments = [line for line in lines if line.startswith(":")]
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        assert len(lines) == len(self.comments) + len(data), self.raw
        self.done = data[-1:] == ["[DONE]"]
        self.chunks = [json.loads(each) for each in data if each != "[DONE]"]

    def choices(self, index: int = 0) -> list[dict[str, Any]]:
        return [c for chunk in self.chunks for c in chunk.get("choices", []) if c["index"] == index]

    def text(self, index: int = 0) -> str:
        return "".join(
            c["text"] if "text" in c else c["delta"].get("content", "") for c in self.choices(index)
        )

    def finish(self, index: int = 0) -> str | None:
        return self.choices(index)[-1]["finish_reason"]

    def scored(self, index: int = 0) -> list[dict[str, Any]]:
        parts = [c["logprobs"] for c in self.choices(index) if c["logprobs"]]
        return [entry for part in parts for entry in part["content"]]

    def scored_lists(self, index: int = 0) -> dict[str, list]:
        out: dict[str, list] = {
            k: [] for k in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }
        for c in self.choices(index):
            for key, values in (c["logprobs"] or {}).items():
                out[key] += values
        return out


class Api:
    """The app without a socket: each call runs its own event loop."""

    def __init__(self, **options: Any):
        script = options.pop("script", fake_engine.babble)
        limits = options.pop("limits", fake_engine.LIMITS)
        served = options.pop("served", None) or toy.make_served()
        self.stall_seconds = options.pop("stall_seconds", 120.0)
        self.profiler = options.pop("profiler", None)
        self.log = options.pop("log", Log())
        self.http = Http(**options)
        self.served, self.engine = served, fake_engine.FakeEngine(limits, script)
        self.app = create_app(
            served, self.engine, self.http, self.log,
            stall_seconds=self.stall_seconds, profiler=self.profiler,
        )  # fmt: skip
        self.engine.start()

    @property
    def core(self) -> fake_engine.FakeCore:
        return self.engine.core

    @property
    def front(self):
        return self.app.state.front

    def client(self, **options: Any) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(app=self.app, **options)
        return httpx.AsyncClient(transport=transport, base_url="http://server", timeout=30)

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        async def go() -> httpx.Response:
            async with self.client(raise_app_exceptions=False) as client:
                return await client.request(method, path, **options)

        return asyncio.run(go())

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.request("GET", path, **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.request("POST", path, json=body, **options)

    def chat(self, content: Any = "hello", **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": content}]
        return self.post("/v1/chat/completions", {"model": "toy", "messages": messages, **fields})

    def complete(self, prompt: Any = "hello", **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {"model": "toy", "prompt": prompt, **fields})

    def stream_chat(self, content: Any = "hello", **fields: Any) -> Stream:
        return Stream(self.chat(content, stream=True, **fields))

    def stream_complete(self, prompt: Any = "hello", **fields: Any) -> Stream:
        return Stream(self.complete(prompt, stream=True, **fields))

    def close(self) -> None:
        self.core.running.set()
        self.engine.shutdown()
        self.front.close()


class Socket:
    """The app behind a real uvicorn on a free port."""

    def __init__(self, api: Api):
        self.api = api
        self.sock = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.sock.getsockname()[1]}"
        self.server = uvicorn.Server(uvicorn_config(api.app, api.http))
        self.thread = threading.Thread(target=self.server.run, args=([self.sock],), daemon=True)
        self.thread.start()
        while not self.server.started:
            assert self.thread.is_alive()

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join(10)


@pytest.fixture
def make_api() -> Iterator[Any]:
    made: list[Api] = []

    def make(**options: Any) -> Api:
        made.append(Api(**options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def api(make_api) -> Api:
    return make_api()


@pytest.fixture
def make_socket(make_api) -> Iterator[Any]:
    made: list[Socket] = []

    def make(**options: Any) -> Socket:
        made.append(Socket(make_api(**options)))
        return made[-1]

    yield make
    for each in made:
        each.close()


def refused(
    response: httpx.Response, status: int, param: str | None = None, code: str | None = None
) -> str:
    """Checks an error's shape; returns its message."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    if param is not None:
        assert error["param"] == param, error
    if code is not None:
        assert error["code"] == code, error
    return error["message"]
