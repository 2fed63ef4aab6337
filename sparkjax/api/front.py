"""What all requests share: the model, the engine, the way to it, and the numbers."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from sparkjax.structured.judge import Judge, judge_of

from . import errors
from .bridge import Bridge
from .engine import EngineService
from .errors import ApiError
from .metrics import Metrics
from .served import ServedModel

if TYPE_CHECKING:
    from .job import Job

T = TypeVar("T")
MOST_PENDING = 256
"""Requests whose text may wait to be turned into tokens."""


class Front:
    """The state of one app. All of it lives on the event loop.

    Attributes:
      jobs: requests that are in the engine.
      judge: of structured output.
      step_tokens: tokens of the batch of events that is being delivered.
    """

    def __init__(self, served: ServedModel, engine: EngineService, stall_seconds: float):
        self.served, self.engine, self.stall_seconds = served, engine, stall_seconds
        self.metrics = Metrics(served.id, engine)
        self.bridge = Bridge(lambda events: self._delivered())
        self.jobs: set[Job] = set()
        self.judge: Judge = judge_of(served.tokenizer, served.vocab_size, served.stop_ids)
        self.step_tokens = 0
        self._pool = ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="text")
        self._pending = 0
        self._seconds = 1.0  # how long requests take lately

    @property
    def longest(self) -> int:
        """The most tokens that prompt and answer of one request can have."""
        limits = self.engine.limits
        return min(self.served.context, limits.context, limits.pages * limits.page_size)

    async def off_loop(self, function: Callable[..., T], *args: Any) -> T:
        """Runs what takes long, and lets go of the interpreter's lock, in another thread.

        Raises:
          ApiError: 503, too many wait for this already.
        """
        if self._pending >= MOST_PENDING:
            raise errors.overloaded("overloaded: too many prompts wait to be read", 1)
        self._pending += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, function, *args)
        finally:
            self._pending -= 1

    def check(self) -> None:
        """Raises ApiError unless the engine takes requests."""
        if self.engine.state != "ready":
            raise self.stopped(self.engine.failure or "")

    def stopped(self, reason: str) -> ApiError:
        """The error of a request that the engine does not take, or did not finish."""
        state = self.engine.state
        if state == "starting":
            return errors.overloaded("the model is still loading", 5)
        if state in ("draining", "stopped"):
            return errors.server_shutdown()
        return errors.engine_failure(self.engine.failure or reason)

    def stalled(self) -> float | None:
        """Seconds without progress, if those are too many."""
        seconds = self.engine.heartbeat()
        return seconds if seconds > self.stall_seconds else None

    def lasted(self, seconds: float) -> None:
        """A request took this long."""
        self._seconds += 0.1 * (seconds - self._seconds)

    def patience(self) -> int:
        """Seconds after which the queue has probably moved."""
        turns = (self.engine.gauges().waiting + 1) / self.engine.limits.slots
        return max(1, min(60, math.ceil(turns * self._seconds)))

    def _delivered(self) -> None:
        if self.step_tokens:
            self.metrics.observe("iteration_tokens_total", self.step_tokens)
            self.step_tokens = 0

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.judge.close()
