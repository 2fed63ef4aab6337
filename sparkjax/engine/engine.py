"""The engine: one step is three verbs, schedule, run, commit."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from .plan import Event, Plan
from .records import Applied, Grammar, Limits, Submit, Tick
from .runner import Flight, Runner
from .scheduler import Scheduler


class Engine:
    """Decides and computes; knows nothing of threads, sockets or text.

    Args:
      model: a `sparkjax.model.Model`.
      limits: how much it may hold and do at a time.
      record: called with every tick before it is applied (the journal).
      applied: called with what each tick made this engine do (the crash log).
    """

    def __init__(
        self,
        model: Any,
        limits: Limits,
        record: Callable[[Tick], None] = lambda tick: None,
        applied: Callable[[Applied], None] | None = None,
    ):
        self.model, self.limits = model, limits
        self.scheduler = Scheduler(limits)
        self.runner = Runner(model, limits)
        self._record, self._applied = record, applied
        if applied is not None:
            self.scheduler.operations = []
        self._flights: deque[Flight] = deque()
        self.plan = Plan(-1)
        """The last tick's plan."""
        self._next_tick = 0
        self._next_id = 0

    def step(self, tick: Tick) -> list[Event]:
        """One tick. The device runs this one's plan while the host reads the last one's results
        (unless the next plan cannot be prepared without them)."""
        plan = self.plan = self.scheduler.schedule(tick)
        self._flights.append(self.runner.run(plan))
        events = self._commit(keep=0 if plan.empty or self.runner.waits else 1)
        if self._applied is not None and self.scheduler.operations is not None:
            done, self.scheduler.operations = self.scheduler.operations, []
            self._applied(Applied(tick.number, self.scheduler.digest, tuple(done)))
        return events

    def follow(self, tick: Tick) -> list[Event]:
        """Another rank: applies a record that rank 0 wrote.

        Raises DigestMismatch, with nothing applied, if this rank has done something else.
        """
        self._record(tick)
        return self.step(tick)

    def _commit(self, keep: int) -> list[Event]:
        events: list[Event] = []
        while len(self._flights) > keep:
            flight = self._flights.popleft()
            done = self.scheduler.commit(flight.plan.number, self.runner.collect(flight))
            for event in done:
                if event.finish is not None:
                    self.runner.release(event.id)
            events += done
        return events

    def prepare(self, grammar: Grammar) -> Future[Any]:
        """Begins to compile a grammar, from any thread; to be waited for before a request with it
        is submitted, since otherwise the engine's thread waits."""
        return self.runner.grammars().prepare(grammar.source)

    # --- Rank 0: writing the ticks ----------------------------------------------------------------

    def new_id(self) -> int:
        """An id for a request; ids rise."""
        self._next_id += 1
        return self._next_id

    def tick(
        self,
        submits: tuple[Submit, ...] = (),
        cancels: tuple[int, ...] = (),
        stops: tuple[int, ...] = (),
    ) -> list[Event]:
        """Writes the next tick record and applies it."""
        tick = Tick(self._next_tick, submits, cancels, stops, self.scheduler.digest)
        self._next_tick += 1
        self._record(tick)
        return self.step(tick)

    @property
    def idle(self) -> bool:
        return self.scheduler.idle
