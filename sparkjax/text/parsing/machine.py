"""The incremental machine under every parser: reading, holding back, and writing events.

A format is a generator that reads as if all text were there and waits where it is not: any cutting
of the text runs the same code over the same characters. Text leaves at once, except for the
longest tail that could still become a tag, and for a call that is not certain to be one.

In token mode a control token is one private mark in the buffer (a lone surrogate, which decoded
UTF-8 never holds), so that its spelling in ordinary text is no tag.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Generator, Mapping
from typing import Any, Literal, TypeVar

from sparkjax.text.events import (
    ContentDelta,
    Event,
    Finish,
    Kind,
    ReasoningDelta,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
)

from .custom import InputReader
from .json_text import JsonScanner, Malformed, quoted

Start = Literal["content", "reasoning", "auto", "call"]
HOLD = 128
"""Characters of arguments that are held back: a call that breaks within them comes back as text."""
LONGEST_NAME = 256
_MARK = 0xDC00
_T = TypeVar("_T")
Reading = Generator[None, None, _T]
"""A reader that may wait for more text."""


class Ended(Exception):
    """The text ended inside of something."""


@dataclasses.dataclass(frozen=True)
class Tool:
    """An offered tool, as a parser needs it.

    Attributes:
      parameters: JSON Schema of the arguments.
    """

    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    kind: Kind = "function"


@dataclasses.dataclass(frozen=True)
class Setup:
    """What a parser has to know of a request.

    Attributes:
      tools: offered tools by name; without any, markup of calls is content.
      start: where the prompt left the model. "content": reasoning is off, nothing is split.
        "reasoning": it is open. "auto": the first token decides. "call": the prompt ends with the
        opening of a block of calls.
      controls: spellings that are single control tokens of the tokenizer; None: every one that
        the format has.
      new_id: the id of call number i.
    """

    tools: Mapping[str, Tool] = dataclasses.field(default_factory=dict)
    start: Start = "content"
    controls: frozenset[str] | None = None
    new_id: Callable[[int], str] = "call_{}".format


class Tags:
    """A set of strings to look for, none of which begins another one."""

    def __init__(self, spellings: tuple[str, ...]):
        self.longest = max(map(len, spellings), default=0)
        ordered = sorted(spellings, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, ordered))) if ordered else None
        self._begins = frozenset(s[:n] for s in spellings for n in range(1, len(s)))
        self._firsts = frozenset(s[0] for s in spellings)

    def held(self, text: str, start: int) -> int:
        """How many characters at the end of `text[start:]` could be the beginning of a tag."""
        begin = max(start, len(text) - self.longest + 1)
        for i in range(begin, len(text)):
            if text[i] in self._firsts and text[i:] in self._begins:
                return len(text) - i
        return 0


class Machine:
    """The base of every parser; see `sparkjax.text.events.Parser`.

    Subclasses give `control` (spellings that are one token where the tokenizer has it) and `read`.
    """

    control: tuple[str, ...] = ()
    hold = HOLD

    def __init__(self, setup: Setup):
        self.setup, self.tools = setup, setup.tools
        self.text_mode = True
        self._marks: dict[str, str] = {}
        self._spellings: dict[int, str] = {}
        self._tags: dict[tuple[str, ...], Tags] = {}
        self._buffer, self._position, self._consumed = "", 0, 0
        self._end: Finish | None = None
        self._reading: Reading[None] | None = None
        self._out: list[Event] = []
        # The calls in question: what was read of them, and their events.
        self._raw: list[str] | None = None
        self._raw_at = 0
        self._pending: list[Event] = []
        self._held = 0
        self._calls = self._certain = 0
        self._kind: Kind = "function"
        self._input: InputReader | None = None
        self._lead = False
        self._newlines = 0
        self._thought = False
        self._gap: list[tuple[str, int]] | None = None
        self.said = False
        self.thinking = setup.start == "reasoning"

    # -- the protocol ---------------------------------------------------------------------------

    def feed(self, text: str, control: bool | None = None) -> list[Event]:
        """See `Parser`."""
        if self._reading is None:
            self._begin(control is not None)
        if control and not self.text_mode:
            text = self._marks.get(text, text)
        self._buffer = self._buffer[self._position :] + text
        self._position = 0
        return self._run()

    def finish(self, reason: Finish) -> list[Event]:
        """See `Parser`."""
        if self._reading is None:
            self._begin(False)
        self._end = reason
        return self._run()

    def read(self) -> Reading[None]:
        """Reads the whole answer."""
        raise NotImplementedError

    def _begin(self, tokens: bool) -> None:
        self.text_mode = not tokens
        known = self.setup.controls
        if tokens:
            marked = [s for s in self.control if known is None or s in known]
            self._marks = {s: chr(_MARK + i) for i, s in enumerate(marked)}
            self._spellings = {_MARK + i: s for i, s in enumerate(marked)}
        self._reading = self.read()

    def _run(self) -> list[Event]:
        if self._reading is not None:
            try:
                next(self._reading)
            except StopIteration:
                # Only an end ends a reader.
                self._reading = iter(())  # type: ignore[assignment]
        out, self._out = self._out, []
        return out

    # -- reading --------------------------------------------------------------------------------

    def marked(self, spelling: str) -> str:
        """A spelling as it stands in the buffer: control tokens in it are marks."""
        for control, mark in self._marks.items():
            spelling = spelling.replace(control, mark)
        return spelling

    def spell(self, text: str) -> str:
        """Text from the buffer as a client reads it."""
        return text.translate(self._spellings) if self._spellings else text

    @property
    def at(self) -> int:
        """How many characters were read, marks counted as what they spell."""
        return self._consumed

    @property
    def ended(self) -> Finish | None:
        """How the text ended, once everything of it was read."""
        return self._end if self._position == len(self._buffer) else None

    @property
    def marks(self) -> frozenset[str]:
        """The marks of control tokens; none in text mode."""
        return frozenset(self._marks.values())

    def waiting(self, count: int) -> str:
        """The next characters that are there, at most `count`, not read."""
        return self._buffer[self._position : self._position + count]

    def scan(self, scanner: JsonScanner) -> str:
        """Reads as far as `scanner` goes."""
        return self.spell(self.take(scanner.scan(self._buffer, self._position) - self._position))

    def take(self, count: int) -> str:
        """Reads characters that are there."""
        text = self._buffer[self._position : self._position + count]
        self._position += count
        self._consumed += len(self.spell(text))
        if self._raw is not None:
            self._raw.append(text)
        return text

    def wait(self) -> Reading[None]:
        """Waits for more text.

        Raises:
          Ended: there is none.
        """
        if self._end is not None:
            raise Ended
        yield

    def peek(self) -> Reading[str]:
        """The next character, not read; "" at the end."""
        while self._position == len(self._buffer):
            if self._end is not None:
                return ""
            yield
        return self._buffer[self._position]

    def rest(self) -> str:
        """Reads what is left in the buffer."""
        return self.take(len(self._buffer) - self._position)

    def until(
        self, tags: tuple[str, ...], sink: Callable[[str, int], object]
    ) -> Reading[str | None]:
        """Reads up to one of the tags, which is read too; text in front goes to `sink` with its place.

        Returns:
          The tag as it was given; None at the end, where the beginning of a tag may be left.
        """
        found = self._tags.get(tags)
        if found is None:
            found = self._tags[tags] = Tags(tuple(map(self.marked, tags)))
        while True:
            match = found.pattern.search(self._buffer, self._position) if found.pattern else None
            stop = match.start() if match else len(self._buffer)
            if not match:
                stop -= found.held(self._buffer, self._position)
            if stop > self._position:
                place = self.at
                sink(self.take(stop - self._position), place)
            if match:
                return self.spell(self.take(len(match[0])))
            if self._end is not None:
                return None
            yield

    def here(self, pattern: re.Pattern[str]) -> str:
        """Reads what matches of the text that is there."""
        match = pattern.match(self._buffer, self._position)
        return self.take(len(match[0])) if match else ""

    def run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Reads a run of characters, as long as it is: `pattern` is one class of characters, `+`."""
        parts = []
        while True:
            parts.append(self.here(pattern))
            if self._position < len(self._buffer) or self._end is not None:
                return "".join(parts)
            yield

    def space(self) -> Reading[str]:
        """Reads white space."""
        return (yield from self.run(_SPACE))

    def looks_at(self, *spellings: str) -> Reading[str | None]:
        """Which of the spellings the text goes on with, not read."""
        marked = [(self.marked(s), s) for s in spellings]
        while True:
            possible = False
            rest = len(self._buffer) - self._position
            for text, spelling in marked:
                if self._buffer.startswith(text, self._position):
                    return spelling
                possible |= rest < len(text) and text.startswith(self._buffer[self._position :])
            if not possible or self._end is not None:
                return None
            yield

    def option(self, *spellings: str) -> Reading[str | None]:
        """Reads one of the spellings if the text goes on with it."""
        found = yield from self.looks_at(*spellings)
        if found is not None:
            self.take(len(self.marked(found)))
        return found

    def ahead(self, end: str, longest: int = LONGEST_NAME) -> Reading[str | None]:
        """The text in front of `end`, not read; None if that does not come soon."""
        while True:
            limit = self._position + longest
            place = self._buffer.find(end, self._position, limit)
            if place >= 0:
                return self.spell(self._buffer[self._position : place])
            if len(self._buffer) >= limit or self._end is not None:
                return None
            yield

    def expect(self, *spellings: str) -> Reading[str]:
        """Reads one of the spellings.

        Raises:
          Malformed: the text goes on differently.
          Ended: it ends.
        """
        found = yield from self.option(*spellings)
        if found is None:
            rest = self._buffer[self._position :]
            if self._end and any(self.marked(s).startswith(rest) for s in spellings):
                raise Ended
            raise Malformed
        return found

    def short(self, *ends: str, longest: int = LONGEST_NAME) -> Reading[tuple[str, str]]:
        """Reads a text of limited length and what ends it.

        Returns:
          (text, end).

        Raises:
          Malformed: none of the ends came.
          Ended: the text ended first.
        """
        marked = {self.marked(e): e for e in ends}
        width = max(map(len, marked))
        while True:
            limit = self._position + longest + width
            places = [
                (i, e) for e in marked if (i := self._buffer.find(e, self._position, limit)) >= 0
            ]
            if places:
                place, end = min(places)
                text = self.take(place - self._position)
                self.take(len(end))
                return self.spell(text), marked[end]
            if len(self._buffer) - self._position >= longest + width:
                raise Malformed
            yield from self.wait()

    # -- calls ----------------------------------------------------------------------------------

    def begin(self, tag: str = "") -> None:
        """What comes (and `tag`, just read) belongs to calls; until they are certain it is kept."""
        if self._raw is None:
            self._raw, self._raw_at = [self.marked(tag)], self.at - len(tag)

    def name(self, name: str, plain: bool = False) -> None:
        """A call begins; `plain`: the input of a custom tool comes as it is, not as JSON."""
        tool = self.tools.get(name)
        kind = tool.kind if tool is not None else "function"
        index, self._calls = self._calls, self._calls + 1
        self._kind = kind
        self._input = InputReader() if kind == "custom" and not plain else None
        self._pending.append(ToolCallStart(index, self.setup.new_id(index), name, kind))

    def argue(self, text: str) -> None:
        """More of the newest call's arguments."""
        if self._input is not None:
            text = self._input.feed(text)
        self._send(text)

    def _send(self, text: str) -> None:
        if not text:
            return
        event = ToolArgumentsDelta(self._calls - 1, text, self._kind)
        if self._raw is None:
            self._out.append(event)
            return
        self._pending.append(event)
        self._held += len(text)
        if self._held >= self.hold:
            self.commit()

    def end_call(self, certain: bool = True) -> None:
        """The newest call is complete; `certain`: nothing that follows can make it text."""
        if self._input is not None:
            self._send(self._input.finish())
        event = ToolCallEnd(self._calls - 1)
        if self._raw is None:
            self._out.append(event)
        else:
            self._pending.append(event)
            if certain:
                self.commit()
        if self._raw is None:
            self._gap = []

    def commit(self) -> None:
        """The pending calls are calls."""
        self._out += _merged(self._pending)
        self._drop()
        self._certain = self._calls
        self._newlines, self._gap = 0, []

    def abandon(self, sink: Callable[[str, int], object], skip: int = 0) -> None:
        """The pending calls are text after all; what was sent of an open one stays as it is.

        Args:
          skip: of what was read, characters in front that are no text.
        """
        if self._raw is None:
            return
        raw, place = "".join(self._raw)[skip:], self._raw_at + skip
        self._drop()
        self._calls = self._certain
        if raw:
            sink(raw, place)

    def cut(self, sink: Callable[[str, int], object], skip: int = 0) -> None:
        """The text ended inside of calls. After the length limit nothing of an open one is shown."""
        if self._end != "length":
            self.abandon(sink, skip)
        elif self._raw is not None:
            ends = [i for i, e in enumerate(self._pending) if isinstance(e, ToolCallEnd)]
            self._out += _merged(self._pending[: ends[-1] + 1] if ends else [])
            self._drop()

    def forget(self) -> None:
        """What was kept since `begin` is neither a call nor text."""
        self._drop()

    def _drop(self) -> None:
        self._raw, self._pending, self._held = None, [], 0

    # -- text -----------------------------------------------------------------------------------

    def say(self, text: str, place: int) -> None:
        """Content; white space right after a call waits for text that follows it."""
        if self._lead:
            kept = text.lstrip("\n")
            place, text = place + len(text) - len(kept), kept
            if not text:
                return
            self._lead = False
        if self._gap is not None:
            if text.isspace():
                self._gap.append((text, place))
                return
            for each in self._gap:
                self._out.append(ContentDelta(*each))
            self._gap = None
        if text:
            self.said = True
            self._out.append(ContentDelta(self.spell(text), place))

    def think(self, text: str, place: int) -> None:
        """Reasoning; newlines at its beginning and end are dropped."""
        del place
        kept = text.strip("\n") if not self._thought else text.rstrip("\n")
        if not kept:
            self._newlines += len(text) if self._thought else 0
            return
        before = "\n" * self._newlines
        self._newlines = len(text) - len(text.rstrip("\n"))
        self._thought = True
        self._out.append(ReasoningDelta(before + self.spell(kept)))

    def reopen(self) -> None:
        """Reasoning goes on in another place: one newline in between."""
        self._newlines = int(self._thought)

    def trim(self) -> None:
        """The newlines that come are no content."""
        self._lead = not self.said


_SPACE = re.compile(r"\s+")


def _merged(events: list[Event]) -> list[Event]:
    """Adjacent pieces of arguments as one."""
    merged: list[Event] = []
    for event in events:
        last = merged[-1] if merged else None
        if (
            isinstance(event, ToolArgumentsDelta)
            and isinstance(last, ToolArgumentsDelta)
            and last.index == event.index
        ):
            merged[-1] = dataclasses.replace(last, text=last.text + event.text)
            continue
        merged.append(event)
    return merged


class Arguments:
    """Writes a JSON object argument by argument, through `Machine.argue`."""

    def __init__(self, machine: Machine):
        self._machine, self._empty = machine, True

    def key(self, key: str) -> None:
        """The next argument begins."""
        lead = "{" if self._empty else ", "
        self._empty = False
        self._machine.argue(f"{lead}{quoted(key)}: ")

    def value(self, text: str) -> None:
        """More of its value, JSON text."""
        self._machine.argue(text)

    def close(self) -> None:
        """The object is complete."""
        self._machine.argue("{}" if self._empty else "}")
