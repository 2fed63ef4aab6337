"""The engine behind a thread: submissions in from anywhere, events out by callback."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Literal

import msgspec

from .. import compiles
from .engine import Engine
from .plan import Event
from .records import Grammar, Limits, Sampling, Submit
from .scheduler import Gauges

log = logging.getLogger(__name__)
Callback = Callable[[Event], None]
EngineState = Literal["starting", "ready", "draining", "stopped", "failed"]
MOST_BYTES = 16 << 20
"""Bytes of new requests, roughly, in one tick: its record is one frame of the journal."""


class QueueFull(RuntimeError):
    """As many requests wait as are allowed to."""


class EngineStopped(RuntimeError):
    """The engine takes no more requests; the message says why."""


@dataclasses.dataclass
class _Inbox:
    """What came in since the last tick."""

    submits: list[Submit] = dataclasses.field(default_factory=list)
    cancels: list[int] = dataclasses.field(default_factory=list)
    stops: list[int] = dataclasses.field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.submits or self.cancels or self.stops)

    def cut(self) -> tuple[_Inbox, _Inbox]:
        """What goes into the next tick, and what waits for the one after it."""
        count, size = 0, 0
        while count < len(self.submits) and (not count or size < MOST_BYTES):
            size += _bytes(self.submits[count])
            count += 1
        left = self.submits[count:]
        # A client may have left before its request is in any tick.
        first = left[0].id if left else None
        early = [id for id in self.cancels if first is not None and id >= first]
        now = [id for id in self.cancels if first is None or id < first]
        return _Inbox(self.submits[:count], now, self.stops), _Inbox(left, early)


def _bytes(submit: Submit) -> int:
    """At least what a request takes in a record."""
    grammar = 4 * len(submit.grammar.source) if submit.grammar is not None else 0
    return 5 * len(submit.tokens) + 15 * len(submit.sampling.logit_bias) + grammar + 1024


class EngineService:
    """Owns the engine's thread. Every public method may be called from any thread.

    Callbacks run on the engine's thread: they must return at once and not raise.
    """

    def __init__(
        self,
        engine: Engine,
        explain: Callable[[Exception], str] = lambda error: f"{type(error).__name__}: {error}",
        ranks: Callable[[], list[tuple[int, str, str, int, float]]] | None = None,
    ):
        self._engine, self._explain, self._ranks = engine, explain, ranks
        self._callbacks: dict[int, Callback] = {}
        self._inbox = _Inbox()
        self._taken = 0  # submissions in the tick that runs
        self._admitted: dict[int, float] = {}
        self._wake = threading.Condition()
        self._beat = time.monotonic()
        self._working = False
        self._gauges = engine.scheduler.gauges()
        self._compiled = compiles.count()
        self.ticks = 0
        self.state: EngineState = "starting"
        self.failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def limits(self) -> Limits:
        return self._engine.limits

    def start(self) -> None:
        """Starts the thread; the engine must be warm."""
        self.state = "ready"
        self._thread.start()

    # --- Requests -------------------------------------------------------------------------------

    def refusal(self, submit: Submit) -> str | None:
        """Why this request can never be served ("field: message"), or None. Its id is not used."""
        return self._engine.scheduler.refusal(submit)

    def submit(
        self,
        tokens: tuple[int, ...],
        sampling: Sampling,
        max_tokens: int,
        stop_ids: tuple[int, ...],
        prompt_logprobs: int | None,
        on_events: Callback,
        grammar: Grammar | None = None,
    ) -> int:
        """Queues a request and returns its id. Its grammar should be prepared (see `prepare`).

        Raises:
          ValueError: it can never be served (see `refusal`).
          QueueFull: try again later.
          EngineStopped: draining, stopped or failed.
        """
        draft = Submit(0, tokens, max_tokens, sampling, stop_ids, prompt_logprobs, grammar)
        reason = self.refusal(draft)
        if reason is not None:
            raise ValueError(reason)
        with self._wake:
            if self.state != "ready":
                raise EngineStopped(self.failure or f"the engine is {self.state}")
            if self._engine.scheduler.queue_full(len(self._inbox.submits) + self._taken):
                raise QueueFull(f"{self.limits.queue} requests wait already")
            request = msgspec.structs.replace(draft, id=self._engine.new_id())
            self._callbacks[request.id] = on_events
            self._inbox.submits.append(request)
            self._wake.notify()
        return request.id

    def prepare(self, grammar: Grammar) -> Future[Any]:
        """Begins to compile a grammar. See `Engine.prepare`."""
        return self._engine.prepare(grammar)

    def cancel(self, id: int) -> None:
        """The client is gone. Unknown and finished ids are ignored."""
        with self._wake:
            if id in self._callbacks:
                self._inbox.cancels.append(id)
                self._wake.notify()

    def stop(self, id: int) -> None:
        """A stop string was found in the request's text: it ends with "stop"."""
        with self._wake:
            if id in self._callbacks:
                self._inbox.stops.append(id)
                self._wake.notify()

    # --- Life -----------------------------------------------------------------------------------

    def drain(self) -> None:
        """Takes no more requests; what runs goes on to its end."""
        with self._wake:
            if self.state == "ready":
                self.state = "draining"
            self._wake.notify()

    def shutdown(self, timeout: float = 10.0) -> None:
        """Ends the thread after the current tick. Requests that still run end with an error."""
        with self._wake:
            if self.state in ("ready", "draining", "starting"):
                self.state = "stopped"
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout)
        self._abandon("the server is shutting down")

    def heartbeat(self) -> float:
        """Seconds since the engine's thread last finished a tick, 0 while it has nothing to do."""
        return time.monotonic() - self._beat if self._working else 0.0

    @property
    def compilations(self) -> int:
        """Programs compiled since the engine was warm: anything above 0 is a bug."""
        return compiles.count() - self._compiled

    def ranks(self) -> list[tuple[int, str, str, int, float]]:
        """(rank, name, stage, records applied, seconds since it was heard) of every rank."""
        if self._ranks is not None:
            return self._ranks()
        return [(0, "rank 0", self.state, self.ticks, self.heartbeat())]

    @property
    def open_requests(self) -> int:
        """Requests whose last event has not been sent."""
        return len(self._callbacks)

    def gauges(self) -> Gauges:
        """The scheduler's gauges after the last tick; queued submissions count as waiting."""
        pending = len(self._inbox.submits)
        return dataclasses.replace(self._gauges, waiting=self._gauges.waiting + pending)

    def fail(self, reason: str) -> None:
        """Declares the engine dead (a watchdog's verdict): every open request gets an error."""
        with self._wake:
            if self.state == "failed":
                return
            self.state, self.failure = "failed", reason
            self._wake.notify()
        log.error("engine failed: %s", reason)
        self._abandon(reason)

    # --- The thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self.state in ("ready", "draining"):
                inbox = self._next_inbox()
                if inbox is None:
                    return
                events = self._engine.tick(
                    tuple(inbox.submits), tuple(inbox.cancels), tuple(inbox.stops)
                )
                self._taken = 0
                self._beat = time.monotonic()
                self.ticks += 1
                for tile in self._engine.plan.tiles:
                    self._admitted.setdefault(tile.request.id, self._beat)
                self._gauges = self._engine.scheduler.gauges()
                self._deliver(events)
                if self._engine.idle:
                    self._engine.scheduler.check()
        except Exception as error:  # the engine is the process's purpose: say so and stop
            log.exception("the engine's thread died")
            self.fail(self._explain(error))

    def _next_inbox(self) -> _Inbox | None:
        """What came in; waits while there is nothing to do. None: the thread should end."""
        with self._wake:
            while not self._inbox and self._engine.idle:
                self._working = False
                if self.state not in ("ready", "draining"):
                    return None
                self._wake.wait()
            if not self._working:
                self._working, self._beat = True, time.monotonic()
            inbox, self._inbox = self._inbox.cut()
            self._taken = len(inbox.submits)
            return inbox

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            callback = self._callbacks.get(event.id)
            event = dataclasses.replace(event, admitted=self._admitted.get(event.id))
            if event.finish is not None:
                self._admitted.pop(event.id, None)
                with self._wake:
                    self._callbacks.pop(event.id, None)
            if callback is not None:
                callback(event)

    def _abandon(self, reason: str) -> None:
        with self._wake:
            callbacks, self._callbacks = self._callbacks, {}
        for id, callback in callbacks.items():
            callback(Event(id, finish="error", error=reason))
