"""Qwen3.5's and MiMo's calls: <tool_call><function=NAME><parameter=K>V</parameter></function></tool_call>."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .json_text import Malformed
from .machine import Arguments
from .reader import Reading
from .tagged import THINK, UNTHINK, Tagged
from .values import property_types, resolve

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_NAME = re.compile(r"[^\s<>{}\"'`,;()]+")


class Qwen(Tagged):
    """A newline on each side of a value is the template's.

    A value ends at its own closing tag. One that was forgotten is seen by the line that follows: a
    declared parameter, or the end of the call.
    """

    control = (THINK, UNTHINK, OPEN, CLOSE)
    openers: tuple[str, ...] = (
        "\n\n" + OPEN,
        "\n" + OPEN,
        OPEN,
        "\n\n" + FUNCTION,
        "\n" + FUNCTION,
        FUNCTION,
    )
    ends: tuple[str, ...] = (
        "\n" + PARAMETER_END,
        PARAMETER_END,
        "\n" + PARAMETER,
        "\n" + FUNCTION_END + "\n" + CLOSE,
        "\n" + FUNCTION_END + CLOSE,
    )
    padded = True

    def calls(self, opener: str) -> Reading[None]:
        """See Tagged."""
        if not opener.endswith(FUNCTION):
            yield from self.space()
            yield from self.expect(FUNCTION)
        name, _ = yield from self.short(">")
        if not _NAME.fullmatch(name):
            raise Malformed
        self.name(name)
        arguments = Arguments(self)
        tool = self.tools.get(name)
        yield from self._arguments(arguments, tool.parameters if tool else {})
        arguments.close()
        self.end_call()
        yield from self.after(CLOSE)

    def _arguments(self, arguments: Arguments, parameters: Mapping[str, Any]) -> Reading[None]:
        declared = resolve(parameters, parameters).get("properties") or {}

        def closes(end: str) -> Reading[bool]:
            if not end.endswith(PARAMETER):
                return True
            key = yield from self.ahead(">")
            return key is not None and (key in declared if declared else bool(_NAME.fullmatch(key)))

        end = ""
        while True:
            if not end.endswith(PARAMETER):
                yield from self.space()
                if not (yield from self.peek()) and self.ended == "stop":
                    return
                if (yield from self.looks_at(OPEN, CLOSE)):  # </function> forgotten
                    return
                end = yield from self.expect(PARAMETER, FUNCTION_END)
            if not end.endswith(PARAMETER):
                return
            key, _ = yield from self.short(">")
            if "<" in key or "\n" in key:
                raise Malformed
            if self.padded:
                yield from self.option("\n")
            arguments.key(key)
            end = yield from self.typed_value(
                arguments,
                property_types(parameters, key),
                ends=self.ends,
                closes=closes,
                closes_last=lambda rest: self.padded and rest.lstrip("\n").startswith(FUNCTION_END),
                python_words=True,
            )
            if not end or FUNCTION_END in end:
                return


class Mimo(Qwen):
    """Values are verbatim, newlines too."""

    openers = (OPEN, FUNCTION)
    ends = (PARAMETER_END,)
    padded = False
