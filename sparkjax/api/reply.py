"""The response of a generation: one path for streams and whole answers, and for clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from . import structured
from .encoding import encode
from .errors import ApiError
from .front import Front
from .gate import Record, error_response, record_of
from .job import Job, Work
from .logprobs import prompt_form
from .wire import Whole, Wire

STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # a reverse proxy must not collect the events
}
KEEP_ALIVE = b": keep-alive\n\n"
NEVER = 1e9
"""Seconds."""
DONE = b"data: [DONE]\n\n"
Prepare = Callable[[], Awaitable[tuple[Work, Wire]]]


async def begin(front: Front, work: Work, arrived: float) -> Job:
    """The job of a request, in the engine; its grammar is compiled by then.

    Raises:
      ApiError: it can never be served, or not now.
    """
    grammar = await structured.grammar_of(front, work.options.constraint)
    job = Job(front, dataclasses.replace(work, grammar=grammar), arrived)
    job.start()
    return job


class Reply(Response):
    """Answers a checked request; cancels it in the engine as soon as its client is gone.

    Args:
      prepare: turns the request's words into tokens.
      id_prefix: of the response's id; `key` is the rest, random where it is not given.
      named: an error in the words of the request's surface.
    """

    def __init__(
        self,
        front: Front,
        prepare: Prepare,
        *,
        id_prefix: str,
        arrived: float,
        silence: float,
        key: str | None = None,
        named: Callable[[ApiError], ApiError] = lambda error: error,
    ):
        super().__init__()
        self._front, self._prepare, self._named = front, prepare, named
        self._id = f"{id_prefix}{key or secrets.token_hex(8)}"
        self._arrived, self._silence = arrived, silence
        self._created = int(time.time())
        self._job: Job | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers, unless the client disconnects first."""
        record = record_of(scope)
        answering = asyncio.create_task(self._answer(scope, receive, send, record))
        leaving = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                record.gone = True
            else:
                answering.result()
        finally:
            if self._job is not None:
                self._job.cancel()  # at once, whatever the tasks are waiting for
            for task in (answering, leaving):
                if not task.done():
                    task.cancel()
                    with contextlib.suppress(asyncio.CancelledError, Exception):
                        await task
            self._note(record)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, record: Record) -> None:
        try:
            work, wire = await self._prepare()
            job = self._job = await begin(self._front, work, self._arrived)
            stream = work.options.stream
            if work.options.ping is not None:
                self._silence = float(work.options.ping) if work.options.ping > 0 else NEVER
            if not stream:
                response = await self._whole(job, work, wire)
        except ApiError as error:
            await error_response(self._named(error), record)(scope, receive, send)
            return
        if not stream:
            await response(scope, receive, send)
            return
        headers = [(k.encode(), v.encode()) for k, v in STREAM_HEADERS.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for data in self._events(job, work, wire, record):
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _whole(self, job: Job, work: Work, wire: Wire) -> Response:
        wholes = [Whole() for _ in range(len(work.prompts) * work.options.n)]
        async for batch in job.pieces(self._silence):
            for index, piece in batch:
                wholes[index].add(piece)
        body = self._head(wire.kind) | {
            "choices": [wire.choice(i, whole) for i, whole in enumerate(wholes)],
            "usage": job.usage.json(),
            "timings": job.timings,
            **work.options.echo,
        }
        if work.options.prompt_logprobs is not None:
            self._add_prompts(body, work, wholes)
        return Response(encode(body), media_type="application/json")

    def _add_prompts(self, body: dict[str, Any], work: Work, wholes: list[Whole]) -> None:
        """vLLM's `prompt_logprobs`: of a chat beside the choices, of completions in each."""
        count, n = work.options.prompt_logprobs or 0, work.options.n
        forms = [
            prompt_form(
                self._front.served.tokenizer, prompt.tokens, wholes[i * n].prompt_logprobs, count
            )
            for i, prompt in enumerate(work.prompts)
        ]
        if not work.continues:
            body["prompt_logprobs"] = forms[0]
            return
        for i, choice in enumerate(body["choices"]):
            choice["prompt_logprobs"] = forms[i // n]

    async def _events(
        self, job: Job, work: Work, wire: Wire, record: Record
    ) -> AsyncIterator[bytes]:
        head = self._head(wire.chunk_kind)
        wanted = work.options.include_usage

        def usage() -> dict[str, Any]:
            if not wanted:
                return {}
            return {"usage": job.usage.json() if work.options.continuous_usage else None}

        try:
            async for batch in job.pieces(self._silence):
                chunks = [
                    head | {"choices": [choice]} | usage()
                    for index, piece in batch
                    for choice in wire.chunks(index, piece)
                ]
                if work.options.obfuscation:
                    chunks = [chunk | {"obfuscation": _padding(chunk)} for chunk in chunks]
                if chunks and job.ended and not wanted:
                    chunks[-1]["timings"] = job.timings
                yield b"".join(map(_event, chunks)) or KEEP_ALIVE
        except ApiError as error:
            # The status was sent long ago: the stream itself has to say it.
            record.refuse(error)
            yield _event(error.body())
        else:
            if wanted:
                last = {"choices": [], "usage": job.usage.json(), "timings": job.timings}
                yield _event(head | last)
        yield DONE

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._front.served.id,
            "system_fingerprint": None,
        }

    def _note(self, record: Record) -> None:
        job = self._job
        if job is None:
            return
        usage = job.usage
        record.fields |= {
            "completion": self._id,
            "model": self._front.served.id,
            "prompt_tokens": usage.prompt,
            "cached_tokens": usage.cached,
            "completion_tokens": usage.completion,
            "finish": job.finish,
        }
        if job.first_token_seconds is not None:
            record.fields["ttft_ms"] = round(job.first_token_seconds * 1000, 1)


async def _disconnected(receive: Receive) -> None:
    """Returns when the client is gone. The body was read before: nothing else can come."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _padding(chunk: dict[str, Any]) -> str:
    """Random characters, at least 16, that fill a chunk up to a multiple of 128 bytes."""
    size = -(len(encode(chunk)) + 16) % 128 + 16
    return secrets.token_urlsafe(size)[:size]


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + encode(value) + b"\n\n"
