"""Errors as Anthropic writes them: {"type": "error", "error": {"type", "message"}}."""

from __future__ import annotations

from typing import Any

from ..errors import ApiError

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}
"""HTTP status -> error type; other ones below 500 are invalid requests, those above api_error."""


def status_of(error: ApiError) -> int:
    """The HTTP status: this API says 529 where others say 503 for lack of room."""
    return 529 if error.code == "overloaded" else error.status


def error_body(error: ApiError) -> dict[str, Any]:
    """The JSON object of the response, and of the event in a stream that has begun."""
    status = status_of(error)
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}
