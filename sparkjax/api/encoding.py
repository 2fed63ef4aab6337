"""JSON as it is sent."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

from sparkjax.text.characters import valid


def encode(value: Any) -> bytes:
    """JSON text in UTF-8. Half of a surrogate pair, which clients send where they cut a text and get back
    with it, becomes U+FFFD: what the model reads in its place."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return msgspec.json.encode(_valid(value))


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON answer."""
    return Response(encode(value), status, headers, media_type="application/json")


def _valid(value: Any) -> Any:
    if isinstance(value, str):
        return valid(value)
    if isinstance(value, dict):
        return {_valid(key): _valid(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_valid(item) for item in value]
    return value
