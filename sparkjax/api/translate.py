"""Another surface's request as a chat request: the body of /v1/chat/completions and where it came from.

The Responses and Anthropic APIs say what a chat request says in other words. Their bodies are
rewritten into the chat's, which has the one parser and the one set of checks; an error then gets
the name back that the client used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from .errors import ApiError, show, unsupported


def pass_on(body: dict[str, Any], chat: dict[str, Any], read: Collection[str], fields: Collection[str]) -> None:
    """Hands the fields that a surface does not read to the chat's parser, which refuses those that
    would change the answer.

    Args:
      read: fields of this surface.
      fields: fields of chat; under this surface they have another name, or none.

    Raises:
      ApiError: 400, such a field is given.
    """
    for name, value in body.items():
        if name in read or value is None:
            continue
        if name in fields:
            raise unsupported(name, f"is no field of this API (it is {show(value)})")
        chat.setdefault(name, value)


@dataclasses.dataclass(frozen=True)
class Translation:
    """A chat body and the origin of its fields.

    Attributes:
      body: as for /v1/chat/completions.
      origin: chat field -> the client's field, e.g. "messages[1]" -> "input[0]". A field that is
        not named is called alike in both.
    """

    body: dict[str, Any]
    origin: Mapping[str, str]

    def named(self, error: ApiError) -> ApiError:
        """The error in the client's words: `param`, and the name that its message begins with."""
        if error.param is None:
            return error
        name = self.name(error.param)
        if name == error.param:
            return error
        message = error.message
        if message.startswith(error.param):
            message = name + message[len(error.param) :]
        return ApiError(
            error.status, message, param=name, code=error.code, headers=error.headers
        )

    def name(self, param: str) -> str:
        """The client's name of a chat field, by the longest known beginning of it."""
        end = len(param)
        while end > 0:
            if param[:end] in self.origin:
                return self.origin[param[:end]] + param[end:]
            end = max(param.rfind(".", 0, end), param.rfind("[", 0, end))
        return param
