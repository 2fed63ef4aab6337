"""Running the API: a socket, signals, a watchdog, and the way out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI

from .app import create_app
from .connection import uvicorn_config
from .engine import EngineService
from .front import Front
from .served import ServedModel

log = logging.getLogger(__name__)

FAILED = 2
"""Exit status after a failure of the engine."""
GRACE = 3.0
"""Seconds in which clients are told how their requests ended."""


def serve_forever(
    served: ServedModel, engine: EngineService, config: Any, sock: socket.socket
) -> int:
    """Serves until a signal or a failure of the engine.

    Args:
      config: `sparkjax.settings.Config`.
      sock: bound, perhaps not listening yet.

    Returns:
      The exit status: 0, or FAILED.

    Raises:
      ValueError, OSError: the file of API keys is empty or cannot be read.
    """
    stall = config.engine.watchdog_seconds
    app = create_app(served, engine, config.http, config.log, stall_seconds=stall)
    app.state.front.judge.start()
    return run(app, engine, config.http, sock, watchdog_seconds=stall)


def run(
    app: FastAPI,
    engine: EngineService,
    http: Any,
    sock: socket.socket,
    *,
    watchdog_seconds: float = 120.0,
) -> int:
    """Serves an app. The first SIGTERM or SIGINT lets running requests finish for up to
    `http.drain_seconds`; a second one ends the process at once.

    Args:
      watchdog_seconds: without progress under load before the engine is declared dead.
    """
    # Connections of a server before this one may not have quite ended.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    host, port = sock.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    server = _Server(uvicorn_config(app, http, timeout_graceful_shutdown=int(GRACE)))
    supervisor = _Supervisor(app.state.front, engine, http.drain_seconds, watchdog_seconds)
    return asyncio.run(supervisor.run(server, sock, url))


class _Server(uvicorn.Server):
    """uvicorn, with the signals left to the supervisor."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Supervisor:
    def __init__(
        self, front: Front, engine: EngineService, drain_seconds: float, watchdog_seconds: float
    ):
        self._front, self._engine = front, engine
        self._drain_seconds, self._watchdog_seconds = drain_seconds, watchdog_seconds
        self._asked = asyncio.Event()

    async def run(self, server: _Server, sock: socket.socket, url: str) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._signal, number)
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        if not serving.done():
            log.info("listening on %s/v1, described at %s/docs", url, url)
        asked = asyncio.create_task(self._asked.wait())
        failing = asyncio.create_task(self._watch())
        await asyncio.wait((serving, asked, failing), return_when=asyncio.FIRST_COMPLETED)
        if asked.done() and not failing.done():
            await self._drain(failing)
        if self._engine.state == "failed":
            log.error("the engine failed: %s; ending", self._engine.failure)
            await self._until_told(GRACE)
        server.should_exit = True
        for task in (asked, failing):
            task.cancel()
        await serving
        return FAILED if self._engine.state == "failed" else 0

    def _signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._asked.is_set():
            log.warning("%s again: ending at once", name)
            sys.stderr.flush()
            # Not sys.exit: threads of the engine or of a tokenizer must not hold the process.
            os._exit(128 + number)
        log.info(
            "%s: taking no more requests, finishing %d (at most %.0f s; once more ends at once)",
            name, len(self._front.jobs), self._drain_seconds,
        )  # fmt: skip
        self._asked.set()

    async def _watch(self) -> None:
        """Returns when the engine is dead. One that makes no progress is declared so."""
        pause = min(1.0, self._watchdog_seconds / 4)
        while self._engine.state != "failed":
            await asyncio.sleep(pause)
            if self._engine.heartbeat() > self._watchdog_seconds:
                self._engine.fail(f"no progress for {self._watchdog_seconds:.0f} s with work to do")

    async def _drain(self, failing: asyncio.Task[None]) -> None:
        self._engine.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._drain_seconds):
                while self._front.jobs and not failing.done():
                    await asyncio.sleep(0.05)
        if self._engine.state == "failed":
            return
        if self._front.jobs:
            log.warning("%d requests did not finish in time", len(self._front.jobs))
        # What still runs ends with an error that its client gets to see.
        await asyncio.to_thread(self._engine.shutdown)
        await self._until_told(GRACE)

    async def _until_told(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._front.jobs:
                    await asyncio.sleep(0.02)
        await asyncio.sleep(0.1)  # the last bytes are on their way
