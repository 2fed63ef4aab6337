"""Hermes' calls, as Qwen3 and many others write them: <tool_call>{"name": N, "arguments": {...}}</tool_call>."""

from __future__ import annotations

from .json_calls import read_call
from .reader import Reading
from .tagged import THINK, UNTHINK, Tagged

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Hermes(Tagged):
    """The block ends where its object does: tags inside of a JSON string are data."""

    control = (THINK, UNTHINK, OPEN, CLOSE)
    openers = ("\n" + OPEN, OPEN)

    def calls(self, opener: str) -> Reading[None]:
        """See Tagged."""
        yield from self.space()
        yield from read_call(self, None, True)
        yield from self.space()
        while (yield from self.peek()) == "{":  # several objects in one block
            self.begin()
            yield from read_call(self, None, True)
            yield from self.space()
        yield from self.option(CLOSE)
