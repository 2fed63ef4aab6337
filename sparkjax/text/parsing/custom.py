"""The input of a custom tool, which models write as a function of one string: {"input": "..."}."""

from __future__ import annotations

import json
import re

from ..characters import valid
from .values import json_value

_HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_PLAIN = re.compile(r'[^"\\]+')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_LOW = re.compile(r"\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_LOW_BEGINS = re.compile(r"(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?")
LONGEST_HEAD = 64


class InputReader:
    """Takes the JSON text of arguments as it comes and gives the text of the input.

    Arguments of another shape come out as they are, at the end.
    """

    def __init__(self) -> None:
        self._waiting = ""
        self._state = "head"

    def feed(self, text: str) -> str:
        """More of the arguments; what is certain of the input."""
        self._waiting += text
        if self._state == "head":
            match = _HEAD.match(self._waiting)
            if match:
                self._state, self._waiting = "string", self._waiting[match.end() :]
            elif len(self._waiting) > LONGEST_HEAD:
                self._state = "other"
        return self._string() if self._state == "string" else ""

    def _string(self) -> str:
        parts, at, text = [], 0, self._waiting
        while at < len(text):
            if match := _PLAIN.match(text, at):
                parts.append(match[0])
                at = match.end()
            elif text[at] == '"':
                self._state = "done"
                break
            elif match := _ESCAPE.match(text, at):
                escape = match[0]
                if escape[:2] == "\\u" and 0xD800 <= int(escape[2:], 16) < 0xDC00:
                    if _LOW_BEGINS.fullmatch(text, match.end()):
                        break  # the other half of a pair may be on its way
                    if second := _LOW.match(text, match.end()):
                        match, escape = second, escape + second[0]
                parts.append(valid(json.loads(f'"{escape}"')))
                at = match.end()
            else:
                break  # an escape that is not whole yet
        self._waiting = text[at:]
        return "".join(parts)

    def finish(self) -> str:
        """The rest of the input, once the arguments are complete."""
        if self._state in ("string", "done"):
            return ""
        try:
            value = json_value(self._waiting)
        except ValueError:
            return self._waiting
        inner = value.get("input") if isinstance(value, dict) and len(value) == 1 else None
        return valid(inner) if isinstance(inner, str) else self._waiting
