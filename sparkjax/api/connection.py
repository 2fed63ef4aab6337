"""One client's connection: uvicorn's, with bounds on how long it may be of no use."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
import msgspec
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from .errors import ApiError

BACKLOG = 2048
HEAD_BYTES = 64 << 10
"""The largest head of a request."""


class Connection(H11Protocol):
    """Closes a connection that keeps its slot without asking anything: one that never begins a
    request, or writes one byte after the other. (uvicorn's own timeout begins after the first
    response and starts again with each byte.)

    Attributes:
      head_seconds: from the first byte of a request, or from the connection's beginning, to the end
        of the request's head.
    """

    head_seconds = 20.0
    _head: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """See asyncio.Protocol."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._stop()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answers what is no HTTP, unless an answer is under way on the same connection."""
        if self.cycle is not None and not self.cycle.response_complete:
            # The head was fine and its handler runs already: nothing it says goes out any more.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        self._refuse(ApiError(400, "this is no HTTP/1.1 request", code="invalid_http"))

    def _refuse(self, error: ApiError) -> None:
        body = msgspec.json.encode(error.body())
        headers = [
            ("content-type", "application/json"), ("content-length", str(len(body))),
            ("connection", "close"),
        ]  # fmt: skip
        for event in (
            h11.Response(status_code=error.status, headers=headers),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _watch(self) -> None:
        """Starts the clock while no request is being answered."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop()
        elif self._head is None:
            self._head = self.loop.call_later(self.head_seconds, self._late)

    def _stop(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def on_response_complete(self) -> None:
        """See H11Protocol. The pause until the next request is uvicorn's to bound; one that has
        begun already is not."""
        self._stop()
        super().on_response_complete()
        if self.conn.trailing_data[0]:
            self._watch()

    def _late(self) -> None:
        self._head = None
        if self.transport.is_closing():
            return
        if self.cycle is None and self.conn.our_state is h11.IDLE:
            self._refuse(ApiError(408, f"no request came within {self.head_seconds:.0f} s"))
        else:
            self.transport.abort()


def uvicorn_config(app: Any, http: Any, **more: Any) -> uvicorn.Config:
    """How the app is served.

    Args:
      http: `sparkjax.settings.Http`.
      more: further arguments of uvicorn.Config.
    """
    return uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        # A client that stays silent between requests; the pauses of a stream are not meant.
        timeout_keep_alive=75,
        # Above the API's own limit, which answers in OpenAI's shape.
        limit_concurrency=2 * http.max_connections + 64,
        h11_max_incomplete_event_size=HEAD_BYTES,
        **more,
    )
