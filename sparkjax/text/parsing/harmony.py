"""gpt-oss' messages: <|start|>role<|channel|>name to=recipient<|constrain|>json<|message|>text<|end|>.

analysis is reasoning, final and commentary are content, and what goes to functions.NAME is a call.
"""

from __future__ import annotations

import re

from .json_calls import read_json
from .json_text import Malformed
from .machine import Machine
from .reader import Ended, Reading

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CONSTRAIN, END, CALL, RETURN = "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"
ENDS = (END, CALL, RETURN)
LONGEST_HEADER = 512
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"\s*(\w+)")


class Harmony(Machine):
    """See the module. The prompt ends behind `<|start|>assistant`."""

    control = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)

    def read(self) -> Reading[None]:
        """See Machine."""
        while (yield from self.peek()):
            header = yield from self._header()
            if header is None:
                return
            channel, recipient = header
            if recipient.startswith("functions.") and self.tools:
                yield from self._call(recipient.removeprefix("functions."))
                continue
            if channel == "analysis":
                self.reopen()
            self.thinking = channel == "analysis"
            sink = self.think if self.thinking else self.say
            if (yield from self.until((*ENDS, START), sink)) is None:
                place, rest = self.at, self.rest()
                if rest:
                    sink(rest, place)
            self.thinking = False

    def _header(self) -> Reading[tuple[str, str] | None]:
        """(channel, recipient) of the next message; None at the end of the answer."""
        self.begin()
        try:
            text = ""
            while not text.strip():  # ends of messages that follow each other
                text, end = yield from self.short(MESSAGE, *ENDS, longest=LONGEST_HEADER)
                if end == MESSAGE:
                    break
                self.forget()
                if text.strip():  # no header at all: plain text, as it came
                    self.say(text, self.at - len(end) - len(text))
                    return "", ""
                self.begin()
        except (Ended, Malformed) as error:
            if isinstance(error, Ended):
                self.rest()
            self.abandon(self.say)
            return None if isinstance(error, Ended) else ("final", "")
        self.forget()
        _, _, channel = text.partition(CHANNEL)
        recipient = _RECIPIENT.search(text)
        name = _CHANNEL.match(channel)
        return name[1] if name else "", recipient[1] if recipient else ""

    def _call(self, name: str) -> Reading[None]:
        self.begin()
        tool = self.tools.get(name)
        self.name(name, plain=True)
        try:
            if tool is not None and tool.kind == "custom":
                yield from self.until(
                    (*ENDS, START), lambda text, place: self.argue(self.spell(text))
                )
            else:
                yield from self._json()
            self.end_call()
        except Malformed:
            self.abandon(self.say)
            yield from self.until((*ENDS, START), self.say)
        except Ended:
            self.rest()
            self.cut(self.say)

    def _json(self) -> Reading[None]:
        """The arguments and the end of their message."""
        yield from self.space()
        if (yield from self.looks_at(*ENDS)):
            self.argue("{}")
        else:
            if (yield from self.peek()) not in ("{", ""):
                raise Malformed
            yield from read_json(self, self.argue, self.marks)
        yield from self.space()
        if (yield from self.peek()):
            yield from self.expect(*ENDS, START)
