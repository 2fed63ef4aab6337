"""What the handlers of all surfaces share."""

from __future__ import annotations

import dataclasses
import secrets
from typing import Any

from starlette.requests import Request

from . import body, chat
from .encoding import encode
from .errors import ApiError
from .front import Front
from .gate import read_body, record_of
from .translate import Translation

SMALL_BODY = 64 << 10
"""Bytes that are parsed at once; larger bodies are parsed beside the event loop."""


@dataclasses.dataclass(frozen=True)
class Desk:
    """How requests are read.

    Attributes:
      http: `sparkjax.settings.Http`.
      log_prompts: whether prompts go to the log.
    """

    front: Front
    http: Any
    log_prompts: bool = False

    async def json(self, request: Request) -> dict[str, Any]:
        """The JSON object of a request.

        Raises:
          ApiError: see `read_body` and `body.parse`.
        """
        raw = await read_body(request, self.http.max_body_bytes)
        if len(raw) <= SMALL_BODY:
            return body.parse(raw)
        return await self.front.off_loop(body.parse, raw)

    def note(self, request: Request, prompt: Any) -> None:
        """Puts a prompt into the log's line, where that is wanted."""
        if self.log_prompts:
            record_of(request.scope).fields["prompt"] = encode(prompt).decode()

    def owner(self, request: Request) -> str:
        """Which API key asks; "" where none is asked for."""
        return str(request.scope.get("sparkjax.key", ""))

    def translated(self, translation: Translation) -> chat.ChatRequest:
        """The checked chat request of another surface's request.

        Raises:
          ApiError: in the client's words.
        """
        try:
            return chat.parse(translation.body, self.front.served, secrets.randbits(64))
        except ApiError as error:
            raise translation.named(error) from None
