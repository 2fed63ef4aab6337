"""Errors as OpenAI writes them: {"error": {message, type, param, code}}."""

from __future__ import annotations

import json
import math
from typing import Any

LONGEST = 80
"""Characters of a client's value that a message repeats."""


class ApiError(Exception):
    """A request that is answered with an error.

    Args:
      status: of the HTTP response.
      message: names the field, the value and what is allowed; the client reads it.
      param: the field, dotted and indexed as in the request ("messages[0].content").
      code: a word for programs.
      retry_after: seconds after which another try makes sense.
      headers: further ones of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})
        if retry_after is not None:
            self.headers["Retry-After"] = str(max(1, math.ceil(retry_after)))

    def body(self) -> dict[str, Any]:
        """The JSON object of the response, and of the event in a stream that has begun."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }


def invalid(param: str, message: str, code: str = "invalid_parameter") -> ApiError:
    """A field with a value that cannot be used; the message begins with its name."""
    return ApiError(400, f"{param} {message}", param=param, code=code)


def missing(param: str, allowed: str) -> ApiError:
    """A field that must be there."""
    return invalid(param, f"is missing; allowed: {allowed}", "missing_required_parameter")


def unsupported(param: str, why: str) -> ApiError:
    """A field, or a value of it, that this server does not implement."""
    return invalid(param, why, "unsupported_parameter")


def too_long(param: str, tokens: int, context: int, exact: bool = True) -> ApiError:
    """A prompt that cannot be read whole; `tokens` may be a lower bound."""
    return invalid(
        param,
        f"has {'' if exact else 'at least '}{tokens} tokens; allowed: at most {context}, prompt "
        "and answer together",
        "context_length_exceeded",
    )


def engine_failure(reason: str) -> ApiError:
    """The engine is dead; so are all requests."""
    return ApiError(503, f"the engine failed: {reason}", code="engine_failure")


def server_shutdown() -> ApiError:
    """The server finishes what runs and takes nothing more."""
    return ApiError(503, "the server is shutting down", code="server_shutdown", retry_after=5)


def overloaded(message: str, retry_after: float) -> ApiError:
    """There is no room now, but there will be."""
    return ApiError(503, message, code="overloaded", retry_after=retry_after)


def show(value: Any) -> str:
    """A client's value for a message: short, and in characters that any log can hold."""
    if isinstance(value, list):
        return f"an array of {len(value)}"
    if isinstance(value, dict):
        return f"an object of {len(value)}"
    if isinstance(value, str) and len(value) > LONGEST:
        return json.dumps(value[:LONGEST]) + f"... ({len(value)} characters)"
    text = json.dumps(value)
    return text if len(text) <= LONGEST else text[:LONGEST] + "..."
