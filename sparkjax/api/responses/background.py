"""Background responses: they go on without the client that asked for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from ..errors import ApiError
from ..job import Job
from ..reply import KEEP_ALIVE
from ..surface import Surface, drive, encode
from .store import Store, Stored

Json = dict[str, Any]


class Background:
    """One response that runs on its own; lives on the event loop.

    Args:
      job: started.
      stored: its place in the store.
    """

    def __init__(self, job: Job, surface: Surface, stored: Stored, store: Store):
        self._job, self._surface, self.stored, self._store = job, surface, stored, store
        self._more = asyncio.Event()
        stored.cancel = self.cancel
        store.put(stored)
        self.task = asyncio.create_task(self._run())

    def cancel(self) -> None:
        """Ends it; what was said stays."""
        if self.stored.running:
            self.stored.stream.cancel()
            self._end()
            self.task.cancel()

    async def _run(self) -> None:
        try:
            async for events in drive(self._job, self._surface, 3600.0):
                self._add(events)
        except ApiError as error:
            self._add(self._surface.fail(error))
        except asyncio.CancelledError:  # by its client, or at the end of the server
            self.stored.stream.cancel()
            raise
        finally:
            self._end()

    def _add(self, events: list[Json]) -> None:
        if self.stored.events is not None:
            self.stored.events += events
        self._wake()

    def _end(self) -> None:
        if self.stored.cancel is not None:
            self.stored.cancel = None
            self._job.cancel()
            self._store.put(self.stored)
            self._wake()

    def _wake(self) -> None:
        self._more.set()
        self._more = asyncio.Event()

    async def read(self, after: int, silence: float) -> AsyncIterator[bytes]:
        """The server-sent events with numbers above `after`, to the end of the response."""
        assert self.stored.events is not None
        while True:
            events = self.stored.events[after + 1 :]
            more = self._more
            if events:
                after += len(events)
                yield encode(events)
            elif not self.stored.running:
                return
            else:
                try:
                    async with asyncio.timeout(silence):
                        await more.wait()
                except TimeoutError:
                    yield KEEP_ALIVE
