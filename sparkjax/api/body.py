"""From the bytes of a request to a JSON object: the only parser of request bodies."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from .errors import ApiError, show

MAX_DEPTH = 64
"""Arrays and objects inside each other. A request of any API here needs fewer than ten."""


class _Twice(ValueError):
    def __init__(self, key: str):
        self.key = key


def parse(raw: bytes) -> dict[str, Any]:
    """The JSON object in `raw`.

    Raises:
      ApiError: 400. Not UTF-8, not JSON (NaN and Infinity are not), not an object, nested deeper
        than MAX_DEPTH, or with a key twice, which two readers could understand differently.
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _bad(f"is not UTF-8 (byte {error.start})") from None
    try:
        # The C scanner counts its own recursion: depth ends in an error, never in a crash.
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except _Twice as error:
        key = show(error.key)
        raise ApiError(
            400, f"the body has the key {key} twice", param="body", code="invalid_parameter"
        ) from None
    except json.JSONDecodeError as error:
        raise _bad(f"is not JSON: {error.msg} (character {error.pos})") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:  # an integer of thousands of digits
        raise _bad(f"is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise _bad("is not a JSON object")
    _check_depth(value)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _Twice(key)
            seen.add(key)
    return found


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _check_depth(value: Any) -> None:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for item in level:
            children = item.values() if isinstance(item, dict) else item
            inner += [child for child in children if isinstance(child, dict | list)]
        if not inner:
            return
        level = inner
    raise _too_deep()


def _too_deep() -> ApiError:
    return _bad(f"nests deeper than {MAX_DEPTH} arrays and objects")


def _bad(message: str) -> ApiError:
    return ApiError(400, f"the body {message}", param="body", code="invalid_json")
