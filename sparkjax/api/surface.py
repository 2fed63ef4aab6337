"""Answers in the words of another surface than OpenAI's chat: events in, server-sent events out.

The request went through the same parser, the same engine and the same answer as a chat request;
only the writing differs. A whole answer is what the events of the streamed one build.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any, Protocol

from starlette.responses import Response

from . import encoding
from .answer import Piece
from .errors import ApiError
from .gate import Record
from .job import Job, Work
from .reply import KEEP_ALIVE, Reply
from .wire import Usage

Json = dict[str, Any]


class Surface(Protocol):
    """How one response is written. It remembers what it wrote."""

    def begin(self, usage: Usage) -> list[Json]:
        """Events as soon as the request is in the engine."""
        ...

    def piece(self, piece: Piece, usage: Usage) -> list[Json]:
        """Events of what is new."""
        ...

    def end(self, job: Job) -> list[Json]:
        """Events after the last piece."""
        ...

    def fail(self, error: ApiError) -> list[Json]:
        """Events of an answer that breaks off."""
        ...

    def whole(self) -> Json:
        """The JSON of the whole answer, once it has ended."""
        ...


async def drive(job: Job, surface: Surface, silence: float) -> AsyncIterator[list[Json]]:
    """The events of a job with one choice, as they come; an empty list after every `silence`
    seconds without one.

    Raises:
      ApiError: the engine failed.
    """
    yield surface.begin(job.usage)
    async for batch in job.pieces(silence):
        events: list[Json] = []
        for _, piece in batch:
            events += surface.piece(piece, job.usage)
        yield events
    yield surface.end(job)


def encode(events: Iterable[Json]) -> bytes:
    """Server-sent events, named by their type."""
    return b"".join(
        b"event: " + event["type"].encode() + b"\ndata: " + encoding.encode(event) + b"\n\n"
        for event in events
    )


class SurfaceReply(Reply):
    """A reply whose `prepare` gives a Surface in place of a Wire."""

    async def _whole(self, job: Job, work: Work, wire: Any) -> Response:
        async for _ in drive(job, wire, self._silence):
            pass
        return Response(encoding.encode(wire.whole()), media_type="application/json")

    async def _events(
        self, job: Job, work: Work, wire: Any, record: Record
    ) -> AsyncIterator[bytes]:
        try:
            async for events in drive(job, wire, self._silence):
                yield encode(events) or KEEP_ALIVE
        except ApiError as error:
            record.refuse(error)
            yield encode(wire.fail(error))
