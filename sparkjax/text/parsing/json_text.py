"""JSON as it comes: a strict reader that says where a value ends."""

from __future__ import annotations

import json
import re


class Malformed(Exception):
    """The text is not what its format asks for."""


DEEPEST = 128
_STRING = re.compile(r'[^"\\\x00-\x1f]+')
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORDS = ("true", "false", "null")
_HEX = frozenset("0123456789abcdefABCDEF")
_SURROGATE = re.compile("[\ud800-\udfff]")


class JsonScanner:
    """Follows one JSON value through any cutting of its text.

    RFC 8259, without NaN and the like; at most DEEPEST arrays and objects inside each other.

    Args:
      stops: characters that no value has, not even in a string.

    Attributes:
      done: the value is complete. A number at the top is complete only when something follows.
      broken: the text is no JSON.
    """

    def __init__(self, stops: frozenset[str] = frozenset()) -> None:
        self.done = self.broken = False
        self._stops = stops
        self._stack: list[str] = []
        self._state = "value"
        self._word = ""
        self._left = 0

    def scan(self, text: str, start: int = 0) -> int:
        """Goes on over `text[start:]`.

        Returns:
          Where it stopped: behind the value, at the character that breaks it, or at the end.
        """
        at, size = start, len(text)
        while at < size and not self.done:
            if self._state == "string":
                match = _STRING.match(text, at)
                if match:
                    at = self._stopped(text, at, match.end())
                    if not self.broken:
                        continue
            try:
                if self.broken or text[at] in self._stops:
                    raise Malformed
                at += self._step(text[at])
            except Malformed:
                self.broken = True
                break
        return at

    def _stopped(self, text: str, start: int, end: int) -> int:
        """Where in a run of characters the first one stands that no value has."""
        for at in range(start, end) if self._stops else ():
            if text[at] in self._stops:
                self.broken = True
                return at
        return end

    def _step(self, char: str) -> int:
        """Takes one character; 0 if it belongs to what follows."""
        state = self._state
        if state == "string":
            if char == '"':
                self._end_string()
            elif char == "\\":
                self._state = "escape"
            else:
                raise Malformed
        elif state == "escape":
            if char == "u":
                self._state, self._left = "hex", 4
            elif char in '"\\/bfnrt':
                self._state = "string"
            else:
                raise Malformed
        elif state == "hex":
            if char not in _HEX:
                raise Malformed
            self._left -= 1
            if not self._left:
                self._state = "string"
        elif state == "number":
            if char in "0123456789+-.eE":
                self._word += char
            else:
                self._end_number()
                return 0
        elif state == "word":
            self._word += char
            if self._word in _WORDS:
                self._end_value()
            elif not any(word.startswith(self._word) for word in _WORDS):
                raise Malformed
        elif char not in " \t\n\r":
            self._structure(char)
        return 1

    def _structure(self, char: str) -> None:
        state = self._state
        if state in ("value", "first"):
            if char == "]" and state == "first":
                self._close(char)
            else:
                self._begin_value(char)
        elif state in ("key", "first key"):
            if char == '"':
                self._state = "string"
                self._stack.append("key")
            elif char == "}" and state == "first key":
                self._close(char)
            else:
                raise Malformed
        elif state == "colon":
            if char != ":":
                raise Malformed
            self._state = "value"
        elif char == ",":
            self._state = "key" if self._stack[-1] == "{" else "value"
        else:
            self._close(char)

    def _begin_value(self, char: str) -> None:
        if char in "{[":
            if len(self._stack) >= DEEPEST:
                raise Malformed
            self._stack.append(char)
            self._state = "first key" if char == "{" else "first"
        elif char == '"':
            self._state = "string"
        elif char in "-0123456789":
            self._state, self._word = "number", char
        elif char in "tfn":
            self._state, self._word = "word", char
        else:
            raise Malformed

    def _close(self, char: str) -> None:
        if not self._stack or self._stack.pop() + char not in ("{}", "[]"):
            raise Malformed
        self._end_value()

    def _end_string(self) -> None:
        if self._stack and self._stack[-1] == "key":
            self._stack.pop()
            self._state = "colon"
        else:
            self._end_value()

    def _end_number(self) -> None:
        # An exponent that no float holds is refused: readers would see infinity.
        if not _NUMBER.fullmatch(self._word) or abs(float(self._word)) == float("inf"):
            raise Malformed
        self._end_value()

    def _end_value(self) -> None:
        self._word = ""
        if self._stack:
            self._state = "comma"
        else:
            self.done = True


def written(value: object) -> str:
    """JSON text of a value. Surrogates are escapes in it: half of a pair has no other form."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return _SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def escaped(text: str) -> str:
    """A part of a JSON string: `written` without the quotes."""
    return written(text)[1:-1]
