"""Pythonic calls, Llama 3.2's and 4's: [f(a=1, b='x'), g()], bare or inside of markers.

The list is read as Python literals and nothing more: a positional argument or an expression makes
it text. Without the markers the whole message is calls of offered tools, or it is content.
"""

from __future__ import annotations

import ast
import re
import warnings
from typing import ClassVar

from .json_text import Malformed, escaped, written
from .machine import Arguments, Machine
from .reader import Ended, Reading

BEGIN, END = "<|python_start|>", "<|python_end|>"
_WORD = re.compile(r"[\w.]+")
_PLAIN = re.compile(r"[^'\"\\\n]+")
_ESCAPE = re.compile(
    r"""\\(?:[\n\\'"abfnrtv]|[0-7]{1,3}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|N\{[^}]{1,100}\})"""
)
_OPENING, _CLOSING = "([{", ")]}"
LONGEST = 1 << 20


class Pythonic(Machine):
    """See the module."""

    control = (BEGIN, END)
    hold = 256

    def read(self) -> Reading[None]:
        """See Machine."""
        if self.tools:
            yield from self._block("", bare=True)
        while True:
            tag = yield from self.until((BEGIN,) if self.tools else (), self.say)
            if tag is None:
                place, rest = self.at, self.rest()
                if rest:
                    self.say(rest, place)
                return
            yield from self._block(BEGIN, bare=False)

    def _block(self, tag: str, bare: bool) -> Reading[None]:
        self.begin(tag)
        try:
            yield from self.space()
            yield from self.expect("[")
            end = ","
            while end == ",":
                yield from self.space()
                yield from self._call(bare)
                yield from self.space()
                end = yield from self.expect(",", "]")
                if end == ",":
                    yield from self.space()
                    end = (yield from self.option("]")) or ","
            yield from self.space()
            if bare and (yield from self.peek()):
                raise Malformed
            self.commit()
            if not bare:
                yield from self.option(END)
        except Malformed:
            self.abandon(self.say)
        except Ended:
            self.rest()
            self.cut(self.say)

    def _call(self, bare: bool) -> Reading[None]:
        name = yield from self.run(_WORD)
        if not name or name[0].isdecimal() or (bare and name not in self.tools):
            if not name and not (yield from self.peek()):
                raise Ended
            raise Malformed
        yield from self.expect("(")
        self.name(name)
        arguments = Arguments(self)
        yield from self.space()
        while (yield from self.option(")")) is None:
            key = yield from self.run(_WORD)
            yield from self.space()
            yield from self.expect("=")
            if not key.isidentifier():
                raise Malformed
            yield from self.space()
            arguments.key(key)
            yield from self._value(arguments)
            yield from self.space()
            if (yield from self.expect(",", ")")) == ")":
                break
            yield from self.space()
        arguments.close()
        self.end_call(certain=False)

    def _value(self, arguments: Arguments) -> Reading[None]:
        first = yield from self.peek()
        if first in ("'", '"') and first:
            arguments.value('"')
            while (yield from self.peek()) in ("'", '"'):  # adjacent strings are one
                yield from self._string(arguments)
                yield from self.space()
            arguments.value('"')
        else:
            arguments.value(literal((yield from self._literal())))

    def _string(self, arguments: Arguments) -> Reading[None]:
        quote = self.take(1)
        if (yield from self.option(quote * 2)):
            quote *= 3
        while True:
            char = yield from self.peek()
            text = self.here(_PLAIN)
            if text:
                arguments.value(escaped(self.spell(text)))
                continue
            if char == "\\":
                arguments.value(escaped((yield from self._escape())))
                continue
            if not char:
                raise Ended
            if (yield from self.option(quote)):
                return
            if char == "\n" and len(quote) == 1:
                raise Malformed
            arguments.value(escaped(self.take(1)))

    def _escape(self) -> Reading[str]:
        while True:
            waiting = self.waiting(128)
            match = _ESCAPE.match(waiting)
            # Octal digits may go on; 100 characters show any other escape.
            if match and (match.end() < len(waiting) or self.ended or not match[0][1].isdecimal()):
                try:
                    return ast.literal_eval(f'"{self.take(match.end())}"')
                except (SyntaxError, ValueError):
                    raise Malformed from None
            if not match and len(waiting) >= 2 and waiting[1] not in "xuUN":
                return self.spell(self.take(2))  # no escape in Python: both characters stay
            if len(waiting) >= 128:
                raise Malformed
            yield from self.wait()

    def _literal(self) -> Reading[str]:
        """The text of a value that is no string: up to a comma or bracket outside of all others."""
        parts: list[str] = []
        depth, quote, size = 0, "", 0
        while True:
            char = yield from self.peek()
            if not char:
                raise Ended
            if quote:
                if char == "\\":
                    parts.append(self.take(1))
                    if not (yield from self.peek()):
                        raise Ended
                elif char == quote:
                    quote = ""
            elif char in "'\"":
                quote = char
            elif char in _OPENING:
                depth += 1
            elif char in _CLOSING or char == ",":
                if not depth:
                    return self.spell("".join(parts))
                depth -= char != ","
            parts.append(self.take(1))
            size += 1
            if size > LONGEST or depth > 100:
                raise Malformed


def literal(text: str) -> str:
    """JSON text of a Python literal; JSON's own words count as Python's.

    Raises:
      Malformed: it is none, or has no JSON form.
    """
    try:
        with warnings.catch_warnings():  # Python warns of text such as 1if
            warnings.simplefilter("ignore")
            tree = ast.parse(text.strip(), mode="eval")
        value = ast.literal_eval(_Words().visit(tree))
        return written(_plain(value))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise Malformed from None


class _Words(ast.NodeTransformer):
    """JSON's own words as Python's constants."""

    words: ClassVar[dict[str, bool | None]] = {"true": True, "false": False, "null": None}

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id in self.words:
            return ast.Constant(self.words[node.id])
        return node


def _plain(value: object) -> object:
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise ValueError("a key is no string")
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, str | int | float) or value is None:
        return value
    raise ValueError(f"{type(value).__name__} has no JSON form")
