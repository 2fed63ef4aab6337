"""The routes of the Messages API."""

from __future__ import annotations

import datetime
import secrets
import time
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..answer import Piece
from ..desk import Desk
from ..encoding import json_response
from ..errors import ApiError
from ..job import Job, Work
from ..surface import SurfaceReply
from ..turn import turn
from ..wire import Usage
from . import request as requests
from .stream import MessageStream

Json = dict[str, Any]


class MessageSurface:
    """Writes one answer as a message."""

    def __init__(self, stream: MessageStream):
        self._stream = stream

    def begin(self, usage: Usage) -> list[Json]:
        """See Surface. Nothing yet: how much of the prompt was cached is known with its first
        token."""
        return []

    def piece(self, piece: Piece, usage: Usage) -> list[Json]:
        """See Surface."""
        return [*self._stream.begin(usage), *self._stream.push(piece.events)]

    def end(self, job: Job) -> list[Json]:
        """See Surface."""
        return self._stream.end(job.finish, job.usage, job.text_stop)

    def fail(self, error: ApiError) -> list[Json]:
        """See Surface."""
        return self._stream.fail(error)

    def whole(self) -> Json:
        """See Surface."""
        return self._stream.message()


def model_card(name: str, created: int) -> Json:
    """One entry of this API's list of models.

    Args:
      created: Unix time.
    """
    at = datetime.datetime.fromtimestamp(created, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"type": "model", "id": name, "display_name": name, "created_at": at}


class Messages:
    """The handlers."""

    def __init__(self, desk: Desk):
        self._desk = desk

    def all(self) -> list[tuple[str, str, Callable]]:
        """(method, path, handler) of each route."""
        return [
            ("POST", "/v1/messages", self.create),
            ("POST", "/v1/messages/count_tokens", self.count),
        ]

    async def create(self, request: Request) -> Response:
        """A new message."""
        arrived, desk = time.monotonic(), self._desk
        values = await desk.json(request)
        desk.front.check()
        translation = requests.parse(values, desk.front.served.thinking.available)
        desk.note(request, values.get("messages"))
        said = desk.translated(translation)
        key = secrets.token_hex(12)

        async def prepare() -> tuple[Work, Any]:
            stream = MessageStream(key, desk.front.served.id)
            return await turn(desk.front, said), MessageSurface(stream)

        return SurfaceReply(
            desk.front, prepare, key=key, id_prefix="msg_", arrived=arrived,
            silence=desk.http.keep_alive_seconds, named=translation.named,
        )  # fmt: skip

    async def count(self, request: Request) -> Response:
        """The tokens that a message's prompt would have."""
        desk = self._desk
        thinks = desk.front.served.thinking.available
        translation = requests.parse(await desk.json(request), thinks, counts=True)
        said = desk.translated(translation)
        try:
            work = await turn(desk.front, said)
        except ApiError as error:
            raise translation.named(error) from None
        return json_response({"input_tokens": sum(len(p.tokens) for p in work.prompts)})
