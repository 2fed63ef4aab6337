"""The routes of the Responses API."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from .. import chat
from ..answer import Piece
from ..desk import Desk
from ..encoding import json_response
from ..errors import ApiError, invalid, show
from ..fields import Fields
from ..job import Job, Work
from ..logprobs import chat_form
from ..reply import STREAM_HEADERS, begin
from ..served import ServedModel
from ..surface import SurfaceReply
from ..turn import turn
from ..wire import Usage
from . import request as requests
from .background import Background
from .store import Store, Stored
from .stream import ResponseStream

Json = dict[str, Any]
MOST_LISTED = 100
_NUMBER = re.compile(r"[0-9]{1,10}")


class ResponsesSurface:
    """Writes one answer as a response, and keeps it where the request asks for that."""

    def __init__(
        self, served: ServedModel, stream: ResponseStream, logprobs: bool,
        keep: Callable[[], None] = lambda: None,
    ):  # fmt: skip
        self._served, self.stream, self._logprobs, self._keep = served, stream, logprobs, keep

    def begin(self, usage: Usage) -> list[Json]:
        """See Surface."""
        return self.stream.begin()

    def piece(self, piece: Piece, usage: Usage) -> list[Json]:
        """See Surface."""
        scored = []
        if self._logprobs and piece.scored:
            scored = chat_form(self._served.tokenizer, piece.scored)["content"]
        return self.stream.push(piece.events, scored)

    def end(self, job: Job) -> list[Json]:
        """See Surface."""
        events = self.stream.end(job.finish, job.usage)
        self._keep()
        return events

    def fail(self, error: ApiError) -> list[Json]:
        """See Surface."""
        return self.stream.fail(error)

    def whole(self) -> Json:
        """See Surface."""
        return self.stream.response()


class Responses:
    """The handlers, and the store that they share."""

    def __init__(self, desk: Desk):
        http = desk.http
        self._desk = desk
        self.store = Store(
            http.stored_responses, http.stored_response_bytes, http.stored_response_seconds
        )
        self._running: set[Background] = set()

    def all(self) -> list[tuple[str, str, Callable]]:
        """(method, path, handler) of each route."""
        one = "/v1/responses/{id}"
        return [
            ("POST", "/v1/responses", self.create),
            ("POST", "/v1/responses/input_tokens", self.count),
            ("GET", one, self.retrieve),
            ("DELETE", one, self.delete),
            ("POST", f"{one}/cancel", self.cancel),
            ("GET", f"{one}/input_items", self.input_items),
        ]

    # --- Making one -------------------------------------------------------------------------------

    async def create(self, request: Request) -> Response:
        """A new response."""
        arrived, desk = time.monotonic(), self._desk
        values = await desk.json(request)
        desk.front.check()
        owner = desk.owner(request)
        before = self._before(values, owner)
        asked = requests.parse(values, before)
        desk.note(request, values.get("input"))
        said = desk.translated(asked.translation)
        key = secrets.token_hex(16)
        stream = ResponseStream(
            key, int(time.time()), desk.front.served.id, _echo(asked, said), asked.background
        )
        stored = Stored(
            owner, (*before, *asked.items), stream, asked.background,
            [] if asked.background and asked.stream else None,
        )  # fmt: skip
        keep = asked.store and desk.http.stored_responses > 0
        surface = ResponsesSurface(
            desk.front.served, stream, asked.logprobs,
            (lambda: self.store.put(stored)) if keep and not asked.background else lambda: None,
        )  # fmt: skip

        async def prepare() -> tuple[Work, Any]:
            return await turn(desk.front, said), surface

        if not asked.background:
            return SurfaceReply(
                desk.front, prepare, key=key, id_prefix="resp_", arrived=arrived,
                silence=desk.http.keep_alive_seconds, named=asked.translation.named,
            )  # fmt: skip
        if not keep:
            raise invalid("background", "needs a store; http.stored_responses is 0 here")
        try:
            job = await begin(desk.front, (await prepare())[0], arrived)
        except ApiError as error:
            raise asked.translation.named(error) from None
        running = Background(job, surface, stored, self.store)
        self._running.add(running)
        running.task.add_done_callback(lambda task: self._running.discard(running))
        if asked.stream:
            return self._events(running, -1)
        return json_response(stream.response())

    async def count(self, request: Request) -> Response:
        """The tokens that a response's prompt would have."""
        desk = self._desk
        values = await desk.json(request)
        translation = requests.count_fields(values, self._before(values, desk.owner(request)))
        said = desk.translated(translation)
        try:
            work = await turn(desk.front, said)
        except ApiError as error:
            raise translation.named(error) from None
        tokens = sum(len(prompt.tokens) for prompt in work.prompts)
        return json_response({"object": "response.input_tokens", "input_tokens": tokens})

    def _before(self, values: Json, owner: str) -> tuple[Json, ...]:
        """The items that a request continues from, and those it names by id."""
        id = requests.previous_id(values)
        if id is None:
            return ()
        stored = self.store.get(id, owner, "previous_response_id")
        if stored.running:
            raise invalid("previous_response_id", f"is {show(id)}, which is not finished yet")
        return stored.conversation

    # --- Those that exist -------------------------------------------------------------------------

    def _stored(self, request: Request) -> Stored:
        return self.store.get(request.path_params["id"], self._desk.owner(request))

    async def retrieve(self, request: Request) -> Response:
        """A response as it is; `stream=true` sends its events (of a background stream)."""
        stored = self._stored(request)
        query = request.query_params
        if query.get("stream", "false") != "true":
            return json_response(stored.stream.response())
        if stored.events is None:
            raise invalid(
                "stream", "is true; allowed: only for a response made with background and stream"
            )
        after = query.get("starting_after", "-1")
        if after != "-1" and not _NUMBER.fullmatch(after):
            raise invalid("starting_after", f"is {show(after)}; allowed: a sequence number")
        for running in self._running:
            if running.stored is stored:
                return self._events(running, int(after))
        return self._replay(stored, int(after))

    async def delete(self, request: Request) -> Response:
        """Forgets a response."""
        id = request.path_params["id"]
        self.store.delete(id, self._desk.owner(request))
        return json_response({"id": id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        """Ends a background response; one that has ended is left as it is."""
        stored = self._stored(request)
        if not stored.background:
            raise invalid("id", "is of a response without background; close its connection instead")
        if stored.cancel is not None:
            stored.cancel()
        return json_response(stored.stream.response())

    async def input_items(self, request: Request) -> Response:
        """What a response answered, newest first unless `order=asc`."""
        stored, query = self._stored(request), Fields(dict(request.query_params))
        order = query.choice("order", ("asc", "desc"), "desc")
        limit = query.string("limit") or "20"
        if not limit.isascii() or not limit.isdecimal() or not 1 <= int(limit[:4]) <= MOST_LISTED:
            raise query.wrong("limit", f"an integer from 1 to {MOST_LISTED}")
        items = [_listed(item, i, stored.stream.id) for i, item in enumerate(stored.items)]
        if order == "desc":
            items.reverse()
        after = query.string("after")
        if after is not None:
            ids = [item["id"] for item in items]
            if after not in ids:
                raise query.wrong("after", "the id of an item of this list")
            items = items[ids.index(after) + 1 :]
        page = items[: int(limit)]
        return json_response(
            {
                "object": "list",
                "data": page,
                "first_id": page[0]["id"] if page else None,
                "last_id": page[-1]["id"] if page else None,
                "has_more": len(page) < len(items),
            }
        )

    def _events(self, running: Background, after: int) -> Response:
        silence = self._desk.http.keep_alive_seconds
        return StreamingResponse(running.read(after, silence), headers=STREAM_HEADERS)

    def _replay(self, stored: Stored, after: int) -> Response:
        from ..surface import encode

        async def events() -> AsyncIterator[bytes]:
            yield encode((stored.events or [])[after + 1 :])

        return StreamingResponse(events(), headers=STREAM_HEADERS)


def _listed(item: Json, number: int, response: str) -> Json:
    """An input item as it is listed: with an id, and words as parts."""
    made = {"id": f"item_{response.removeprefix('resp_')}_{number}", **item}
    content = item.get("content")
    if made.setdefault("type", "message") == "message" and isinstance(content, str):
        kind = "output_text" if item.get("role") == "assistant" else "input_text"
        made["content"] = [{"type": kind, "text": content}]
    return made


def _echo(asked: requests.ResponsesRequest, said: chat.ChatRequest) -> Json:
    sampling = said.options.sampling
    return {
        **asked.echo,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
    }


