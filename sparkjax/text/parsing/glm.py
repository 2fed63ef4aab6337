"""GLM-4.5 and later: <tool_call>NAME<arg_key>K</arg_key><arg_value>V</arg_value></tool_call>."""

from __future__ import annotations

import re

from .json_text import Malformed
from .machine import Arguments
from .reader import Reading
from .tagged import THINK, UNTHINK, Tagged
from .values import property_types

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
_NAME = re.compile(r"[^\s<>{}\"'`,;()]+")


class Glm(Tagged):
    """String values are verbatim; others are JSON."""

    control = (THINK, UNTHINK, OPEN, CLOSE, KEY, KEY_END, VALUE, VALUE_END)
    openers = (OPEN,)

    def calls(self, opener: str) -> Reading[None]:
        """See Tagged."""
        name, end = yield from self._name()
        self.name(name)
        tool = self.tools.get(name)
        arguments = Arguments(self)
        while end == KEY:
            key, _ = yield from self.short(KEY_END)
            yield from self.space()
            yield from self.expect(VALUE)
            arguments.key(key)
            types = property_types(tool.parameters if tool else {}, key)
            yield from self.typed_value(arguments, types, ends=(VALUE_END,))
            yield from self.space()
            if not (yield from self.peek()) and self.ended == "stop":
                break
            end = yield from self._next()
        arguments.close()
        self.end_call()

    def _name(self) -> Reading[tuple[str, str]]:
        """The name and what follows it: an argument, or the end."""
        name, end = yield from self.short(KEY, CLOSE)
        name = name.strip()
        if not _NAME.fullmatch(name):
            raise Malformed
        return name, end

    def _next(self) -> Reading[str]:
        """After a value: another argument, the end, or (the end forgotten) another call."""
        if (yield from self.option(KEY)):
            return KEY
        if (yield from self.looks_at(OPEN)):
            return CLOSE
        return (yield from self.expect(CLOSE, KEY))
