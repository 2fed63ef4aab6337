"""DeepSeek-V4's and V4.1's DSML: blocks of calls with one tag for each argument.

V4 writes `<｜DSML｜tool_calls>`, V4.1 `<｜DSML｜ calls>`; ｜DSML｜ is one control token. Each argument
says itself whether it is a string.
"""

from __future__ import annotations

import re

from .json_text import Malformed
from .machine import Arguments
from .reader import Reading
from .tagged import THINK, UNTHINK, Tagged
from .values import TYPES, property_types

WORD = "｜DSML｜"
MARKER, CLOSER = "<" + WORD, "</" + WORD
BLOCKS = ("tool_calls>", " calls>")
INVOKE = ("invoke ", " invoke ")
_INVOKE = re.compile(r'name="([^"]+)"\s*(/?)')
_PARAMETER = re.compile(r'name="([^"]*)"(?:\s+string="(true|false)")?')


class Dsml(Tagged):
    """See the module."""

    control = (THINK, UNTHINK, WORD)
    openers = ("\n\n" + MARKER, "\n" + MARKER, MARKER)

    def calls(self, opener: str) -> Reading[None]:
        """See Tagged."""
        if opener and (yield from self.expect(*BLOCKS, *INVOKE)) in INVOKE:
            yield from self._call()
            return
        first = True
        while True:
            yield from self.space()
            if not first:
                if not (yield from self.peek()) and self.ended == "stop":
                    return  # the block's own end was forgotten
                self.begin()
            if (yield from self.option(*(CLOSER + block for block in BLOCKS))):
                if first:
                    raise Malformed
                self.forget()
                return
            yield from self.expect(*(MARKER + word for word in INVOKE))
            yield from self._call()
            first = False

    def _call(self) -> Reading[None]:
        header, _ = yield from self.short(">")
        match = _INVOKE.fullmatch(header)
        if not match:
            raise Malformed
        self.name(match[1])
        arguments = Arguments(self)
        if not match[2]:
            yield from self._arguments(arguments, match[1])
        arguments.close()
        self.end_call()

    def _arguments(self, arguments: Arguments, name: str) -> Reading[None]:
        tool = self.tools.get(name)
        closers = tuple(CLOSER + word for word in ("invoke>", " invoke>"))
        nexts = tuple(MARKER + word for word in INVOKE) + tuple(CLOSER + b for b in BLOCKS)
        values = tuple(CLOSER + word for word in ("parameter>", " parameter>"))
        while True:
            yield from self.space()
            if not (yield from self.peek()) and self.ended == "stop":
                return
            if (yield from self.option(*closers)) or (yield from self.looks_at(*nexts)):
                return
            yield from self.expect(*(MARKER + word for word in ("parameter ", " parameter ")))
            header, _ = yield from self.short(">")
            match = _PARAMETER.fullmatch(header)
            if not match:
                raise Malformed
            key, string = match[1], match[2]
            types = property_types(tool.parameters if tool else {}, key)
            if string:
                types = frozenset(["string"]) if string == "true" else TYPES
            arguments.key(key)
            yield from self.typed_value(arguments, types, ends=values)
