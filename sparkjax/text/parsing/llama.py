"""Llama 3's calls: {"name": N, "parameters": {...}}; {...}, with <|python_tag|> in front or bare.

Without the tag the whole message is calls of offered tools, or it is content: an ordinary JSON
answer stays one.
"""

from __future__ import annotations

from .json_calls import read_call
from .json_text import Malformed
from .machine import Machine
from .reader import Ended, Reading

TAG = "<|python_tag|>"


class Llama(Machine):
    """See the module."""

    control = (TAG,)
    hold = 256

    def read(self) -> Reading[None]:
        """See Machine."""
        if self.tools:
            yield from self._block("", bare=True)
        while True:
            tag = yield from self.until((TAG,) if self.tools else (), self.say)
            if tag is None:
                place, rest = self.at, self.rest()
                if rest:
                    self.say(rest, place)
                return
            yield from self._block(TAG, bare=False)

    def _block(self, tag: str, bare: bool) -> Reading[None]:
        self.begin(tag)
        try:
            yield from self.space()
            while True:
                yield from read_call(self, self.tools if bare else None, certain=not bare)
                if not bare:
                    self.begin()
                yield from self.space()
                if not (yield from self.peek()):
                    break
                if (yield from self.option(";")):
                    yield from self.space()
                    if not (yield from self.peek()):
                        break
            if bare:
                self.commit()
            else:
                self.forget()
        except Malformed:
            self.abandon(self.say)
        except Ended:
            self.rest()
            self.cut(self.say)
