"""What every request passes: its id, the key, the limits, and one line in the log."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
import secrets
import time
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from . import errors
from .anthropic import errors as anthropic
from .encoding import json_response
from .errors import ApiError
from .keys import Keys, RateLimit
from .metrics import Metrics
from .pages import PAGES

log = logging.getLogger("sparkjax.request")

OPEN = frozenset(["/health", *PAGES])
"""Routes that ask for no key: liveness, which tells nothing, and pages, which ask their reader."""
QUIET = frozenset(["/health", "/ready", "/metrics", "/status"])
"""Routes that machines poll: their lines are for debugging."""
BODY_SECONDS = 60.0
DISCARD = 64 << 20
"""Bytes of a body over the limit that are still read, so that its sender gets to see the answer."""
_LABEL = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


@dataclasses.dataclass
class Record:
    """What the log says of one request.

    Attributes:
      gone: its client left before the answer was complete.
      fields: further ones, in order.
      anthropic: errors are written as Anthropic's API does.
    """

    id: str
    status: int = 0
    gone: bool = False
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    code: str | None = None
    anthropic: bool = False

    def refuse(self, error: ApiError) -> None:
        """Notes the error that answers the request."""
        self.code = error.code or str(error.status)
        self.fields["error"] = error.message


def record_of(scope: Scope) -> Record:
    """The record of a request."""
    found = scope.get("sparkjax.record")
    return found if isinstance(found, Record) else Record("")


def error_response(error: ApiError, record: Record | None = None) -> Response:
    """An error in OpenAI's shape, or in that of the request's own API."""
    if record is not None:
        record.refuse(error)
        if record.anthropic:
            status = anthropic.status_of(error)
            body = anthropic.error_body(error) | {"request_id": record.id}
            return json_response(body, status, error.headers)
    return json_response(error.body(), error.status, error.headers)


class Gate:
    """ASGI middleware around the whole app.

    Args:
      keys: None asks for none.
      limit: of each key, or None.
      most: requests that may be open at a time.
      origins: web origins that may call; "*" is all.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        metrics: Metrics,
        keys: Keys | None = None,
        limit: RateLimit | None = None,
        most: int = 512,
        origins: tuple[str, ...] = (),
    ):
        self._app, self._metrics = app, metrics
        self._keys, self._limit, self._most, self._origins = keys, limit, most, origins
        self._open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        record = Record(request_id(Headers(scope=scope).get("x-request-id")))
        record.anthropic = scope["path"].startswith("/v1/messages")
        scope["sparkjax.record"] = record

        async def labelled(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = record.id
                if record.anthropic:
                    headers["Request-Id"] = record.id
            await send(message)

        self._open += 1
        try:
            try:
                self._check(scope)
            except ApiError as error:
                await error_response(error, record)(scope, receive, labelled)
            else:
                await self._app(scope, receive, labelled)
        finally:
            self._open -= 1
            if record.code is not None:
                self._metrics.refused(record.code)
            _write(scope, record, time.monotonic() - started)

    def _check(self, scope: Scope) -> None:
        headers, path = Headers(scope=scope), scope["path"]
        if path in OPEN:
            return
        key = ""
        if self._keys is not None:
            key = scope["sparkjax.key"] = self._keys.check(_authorization(headers))
        else:
            self._check_origin(headers)
        if self._open > self._most:
            raise errors.overloaded(f"overloaded: {self._most} requests are open already", 1)
        if self._limit is not None and scope["method"] == "POST":
            self._limit.check(key)

    def _check_origin(self, headers: Headers) -> None:
        """Without keys, any web page that a user of this machine looks at could call the server.
        Browsers say where a page comes from; other clients do not."""
        origin = headers.get("origin")
        if origin is None or "*" in self._origins or origin in self._origins:
            return
        if urlsplit(origin).netloc != headers.get("host"):
            raise ApiError(
                403,
                f"pages from {errors.show(origin)} may not call this server; http.cors_origins lists "
                "those that may",
                code="origin_not_allowed",
            )


def _authorization(headers: Headers) -> str | None:
    """The Authorization header; Anthropic's clients send the key alone, in X-Api-Key."""
    given, key = headers.get("authorization"), headers.get("x-api-key")
    return given if given is not None or key is None else f"Bearer {key}"


def request_id(label: str | None) -> str:
    """The client's own label if it is harmless in a header and a log, else a new one."""
    if label is not None and _LABEL.fullmatch(label):
        return label
    return f"req-{secrets.token_hex(8)}"


async def read_body(request: Request, most: int) -> bytes:
    """The body of a request that should be JSON.

    Raises:
      ApiError: 413 above `most` bytes, 415 for another type, 408 when it does not come.
    """
    kind = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size <= most:
                    parts.append(part)
                elif size > most + DISCARD:
                    break
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {BODY_SECONDS:.0f} s") from None
    except ClientDisconnect:
        raise ApiError(400, "the client left before its request was complete") from None
    if size > most:
        raise ApiError(
            413, f"the body is larger than {most} bytes (http.max_body_bytes)",
            param="body", code="request_too_large",
        )  # fmt: skip
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(
            415,
            f"Content-Type is {errors.show(kind)}; allowed: application/json",
            code="unsupported_media_type",
        )
    return b"".join(parts)


def _write(scope: Scope, record: Record, seconds: float) -> None:
    level = logging.DEBUG if scope["path"] in QUIET and record.status < 400 else logging.INFO
    if not log.isEnabledFor(level):
        return
    fields = {
        "request": record.id,
        "method": scope["method"],
        "path": scope["path"][:128],
        "status": 499 if record.gone else record.status,
        "duration_ms": round(seconds * 1000, 1),
        **record.fields,
    }
    if record.code is not None:
        fields["code"] = record.code
    log.log(level, "request", extra={"fields": fields})
