"""A hub for tests: the sharing server over a made-up repository, with faults on demand."""

from __future__ import annotations

import hashlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from sparkjax.fetch import hashes, share
from sparkjax.fetch.store import File, Record, Store, stamp, write_record

COMMIT = hashlib.sha1(b"a commit").hexdigest()
LARGE = (".safetensors", ".gguf")


def publish(folder: Path, repository: str, files: dict[str, bytes], commit: str = COMMIT) -> Store:
    """A store that holds these files, as if they had been pulled."""
    store = Store(folder)
    home = store.commit(repository, commit)
    listed = []
    verified = {}
    for name, data in files.items():
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        kind = "sha256" if name.endswith(LARGE) else "git-sha1"
        listed.append(File(name=name, size=len(data), kind=kind, hash=hashes.of(path, kind)))
        verified[name] = stamp(path)
    record = Record(repository=repository, commit=commit, files=listed, verified=verified)
    write_record(home, record)
    store.remember(repository, "main", commit)
    return store


class Faults:
    """What the server does wrong, around the app (ASGI).

    Attributes:
      cut: for each request for bytes, close the connection after so many of them (None: do not).
      flip: a bit of every answer's bytes is wrong.
      whole: ranges are ignored, as some proxies do.
      seen: [path, range] of every request.
    """

    def __init__(self, app: Any):
        self.app = app
        self.reset()

    def reset(self) -> None:
        """A faultless server that has seen nothing."""
        self.cut: list[int | None] = []
        self.flip = 0
        self.whole = False
        self.seen: list[tuple[str, str]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = dict(scope["headers"])
        self.seen.append((scope["path"], headers.get(b"range", b"").decode()))
        if self.whole:
            scope["headers"] = [(k, v) for k, v in scope["headers"] if k != b"range"]
        bytes_asked = "/resolve/" in scope["path"]
        left = self.cut.pop(0) if self.cut and bytes_asked else None
        flip = bytes_asked and self.flip > 0 and scope["path"].endswith(LARGE)
        if flip:
            self.flip -= 1

        async def sent(message: Any) -> None:
            nonlocal left, flip
            body = message.get("body", b"")
            if message["type"] == "http.response.body" and body:
                if flip:
                    message = {**message, "body": bytes([body[0] ^ 1]) + body[1:]}
                    flip = False
                if left is not None:
                    if len(body) > left:
                        await send({**message, "body": message["body"][:left], "more_body": True})
                        raise ConnectionResetError("a fault on demand")
                    left -= len(body)
            await send(message)

        await self.app(scope, receive, sent)


class Running:
    """A server on a free port.

    Attributes:
      url: its address.
      faults: see `Faults`.
    """

    def __init__(self, store: Store, keys: tuple[str, ...] = ()):
        self.faults = Faults(share.app(store, keys))
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._server = uvicorn.Server(uvicorn.Config(self.faults, log_level="critical"))
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],))

    @contextmanager
    def __call__(self) -> Iterator[Running]:
        self._thread.start()
        try:
            yield self
        finally:
            self._server.should_exit = True
            self._thread.join()
            self._socket.close()
