"""Answers with tags: reasoning in <think>, calls in blocks that begin with an opening tag."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .json_text import Malformed, escaped
from .machine import Arguments, Machine
from .reader import Ended, Reading
from .values import typed

Sink = Callable[[str, int], object]

THINK, UNTHINK = "<think>", "</think>"


class Tagged(Machine):
    """The frame of GLM, Qwen, MiMo, DSML and Hermes.

    Subclasses give `openers` (tags that begin a block of calls, with the newlines that the template
    puts in front) and `calls`, which reads a block after its opener.
    """

    openers: tuple[str, ...] = ()

    def calls(self, opener: str) -> Reading[None]:
        """Reads one block of calls.

        Raises:
          Malformed: it is none.
          Ended: the text ended before it was complete.
        """
        raise NotImplementedError

    def read(self) -> Reading[None]:
        """See Machine."""
        start = self.setup.start
        splits = start != "content"
        thinking = start == "reasoning"
        if start == "auto":
            yield from self.newlines()
            thinking = (yield from self.option(THINK)) is not None
        if start == "call" and self.tools and self.openers:
            yield from self._block("", self.say)
        elif thinking:
            yield from self._skip_opening()
        openers = self.openers if self.tools else ()
        closers: tuple[str, ...] = (UNTHINK,) if splits else ()
        if splits and not self.text_mode:
            closers += (THINK,)
        while True:
            self.thinking = thinking
            sink: Sink = self.think if thinking else self.say
            tags = (UNTHINK,) if thinking else closers
            tag = yield from self.until((*tags, *openers), sink)
            if tag is None:
                self._end_in_tag(sink)
                return
            if tag == UNTHINK:
                thinking = False
                self.trim()
            elif tag == THINK:
                thinking = True
                self.reopen()
            else:
                thinking &= not (yield from self._block(tag, sink))

    def newlines(self) -> Reading[None]:
        """Reads newlines in front of everything; they are no content."""
        while (yield from self.peek()) == "\n":
            self.take(1)

    def _skip_opening(self) -> Reading[None]:
        """The prompt opened the reasoning; a model that opens it again says nothing by it."""
        yield from self.newlines()
        yield from self.option(THINK)

    def _end_in_tag(self, sink: Sink) -> None:
        place = self.at
        rest = self.rest()
        if rest:
            sink(rest, place)

    def _block(self, opener: str, sink: Sink) -> Reading[bool]:
        """Reads a block; whether a call was in it. What is no call is text where it stands."""
        before = self._certain
        self.begin(opener)
        try:
            yield from self.calls(opener)
        except Malformed:
            self.abandon(sink if self._certain == before else self.say)
        except Ended:
            self.rest()
            self.cut(sink if self._certain == before else self.say)
        return self._certain > before

    def after(self, closer: str) -> Reading[None]:
        """Reads the closing tag behind a complete call, if it comes."""
        yield from self.space()
        yield from self.option(closer)

    def value(
        self,
        ends: tuple[str, ...],
        write: Callable[[str], object],
        closes: Callable[[str], Reading[bool]] | None = None,
        closes_last: Callable[[str], bool] = lambda rest: False,
    ) -> Reading[str]:
        """Reads a value up to one of its ends.

        Args:
          closes: whether an end that was found is one here; else it is part of the value.
          closes_last: whether the unfinished rest of an answer ends the value.

        Returns:
          The end, "" at the end of the answer.

        Raises:
          Ended: no end came.
        """

        def sink(text: str, place: int) -> None:
            write(self.spell(text))

        while True:
            end = yield from self.until(ends, sink)
            if end is None:
                rest = self.spell(self.rest())
                if self.ended == "stop" and closes_last(rest):
                    return ""
                write(rest)
                raise Ended
            if closes is None or (yield from closes(end)):
                return end
            write(end)

    def typed_value(self, arguments: Arguments, types: frozenset[str], **how: Any) -> Reading[str]:
        """`value` of an argument: a string is written as it comes, others once they are whole."""
        python_words = how.pop("python_words", False)
        if types == {"string"}:
            arguments.value('"')
            end = yield from self.value(write=lambda t: arguments.value(escaped(t)), **how)
            arguments.value('"')
            return end
        parts: list[str] = []
        end = yield from self.value(write=parts.append, **how)
        arguments.value(typed("".join(parts), types, python_words))
        return end
