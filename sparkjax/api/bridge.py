"""From the engine's thread to the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable

from sparkjax.engine.plan import Event

Sink = Callable[[Event], None]


class Bridge:
    """Carries events over, with one wake-up of the loop for all that came meanwhile.

    Args:
      after: called on the loop after each batch, with its events.
    """

    def __init__(self, after: Callable[[list[Event]], None] = lambda events: None):
        self._after = after
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Sink, Event]] = deque()
        self._called = False

    def bind(self) -> None:
        """Delivers on the running loop from now on."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            with self._lock:
                self._loop, self._called = loop, False
                self._waiting.clear()

    def to(self, sink: Sink) -> Sink:
        """A callback for the engine that calls `sink` on the loop, in order."""

        def post(event: Event) -> None:
            with self._lock:
                self._waiting.append((sink, event))
                if self._called or self._loop is None:
                    return
                self._called = True
            try:
                self._loop.call_soon_threadsafe(self._flush)
            except RuntimeError:  # the loop is closed: nobody is left to tell
                with self._lock:
                    self._waiting.clear()

        return post

    def _flush(self) -> None:
        with self._lock:
            batch, self._waiting, self._called = self._waiting, deque(), False
        for sink, event in batch:
            sink(event)
        self._after([event for _, event in batch])
