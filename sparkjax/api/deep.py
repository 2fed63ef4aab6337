"""`/health?deep=1`: do the devices still hold the weights that were read?"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

AGE = 10.0
"""Seconds for which a result counts: the route asks for no key, and a check reads every weight."""


class WeightCheck:
    """Checks at most once at a time, and not again at once. Lives on the event loop.

    Args:
      check: gives what is wrong, in words; runs in a thread. None where nothing can be checked.
      now: a clock, in seconds.
    """

    def __init__(
        self, check: Callable[[], list[str]] | None, now: Callable[[], float] = time.monotonic
    ):
        self._check, self._now = check, now
        self._running: asyncio.Task[list[str]] | None = None
        self._found: tuple[float, list[str]] | None = None

    async def problems(self) -> list[str] | None:
        """What is wrong; None where nobody can say."""
        if self._check is None:
            return None
        if self._found is not None and self._now() - self._found[0] < AGE:
            return self._found[1]
        if self._running is None:
            self._running = asyncio.create_task(self._run(self._check))
        # A caller that leaves must not end the check of the others.
        return await asyncio.shield(self._running)

    async def _run(self, check: Callable[[], list[str]]) -> list[str]:
        try:
            found = await asyncio.to_thread(check)
            self._found = self._now(), found
            return found
        finally:
            self._running = None
