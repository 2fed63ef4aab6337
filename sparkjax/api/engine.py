"""What the API needs of the engine, and nothing more."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from sparkjax.engine.plan import Event
from sparkjax.engine.records import Grammar, Limits, Sampling, Submit


class Gauges(Protocol):
    """The scheduler's numbers after its last tick."""

    @property
    def running(self) -> int: ...
    @property
    def prefilling(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def pages(self) -> int: ...
    @property
    def pages_total(self) -> int: ...


class EngineService(Protocol):
    """`sparkjax.engine.service.EngineService`, or a test's fake. Any thread may call any method."""

    @property
    def limits(self) -> Limits: ...
    @property
    def state(self) -> Any: ...
    @property
    def failure(self) -> str | None: ...

    @property
    def compilations(self) -> int: ...

    def refusal(self, submit: Submit) -> str | None:
        """Why a request can never be served ("field: message"), or None."""

    def submit(
        self,
        tokens: tuple[int, ...],
        sampling: Sampling,
        max_tokens: int,
        stop_ids: tuple[int, ...],
        prompt_logprobs: int | None,
        on_events: Callable[[Event], None],
        grammar: Grammar | None = None,
    ) -> int:
        """Queues a request. Raises QueueFull, EngineStopped, or ValueError (see `refusal`)."""

    def prepare(self, grammar: Grammar) -> Future[Any]:
        """Begins to compile a grammar; to be waited for before a request is submitted with it."""

    def cancel(self, id: int) -> None:
        """The client is gone."""

    def stop(self, id: int) -> None:
        """A stop string was found in the text."""

    def heartbeat(self) -> float:
        """Seconds since the engine last made progress, 0 while it has nothing to do."""

    def ranks(self) -> list[tuple[int, str, str, int, float]]:
        """(rank, name, stage, records applied, seconds since it was heard) of every rank."""

    def gauges(self) -> Gauges:
        """See Gauges."""

    def drain(self) -> None:
        """Takes no more requests."""

    def shutdown(self) -> None:
        """Ends; what still runs gets an error."""

    def fail(self, reason: str) -> None:
        """Declares the engine dead."""
