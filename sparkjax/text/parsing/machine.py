"""The incremental machine under every parser: reading, holding back, and writing events.

A format is a generator over a `Reader` that writes what it reads through this class. Text leaves at
once, except for the longest tail that could still become a tag, and for a call that is not certain
to be one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

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
from .json_text import written
from .reader import Reader, Reading

Start = Literal["content", "reasoning", "auto", "call"]
HOLD = 128
"""Characters of arguments that are held back: a call that breaks within them comes back as text."""


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


class Machine(Reader):
    """The base of every parser; see `sparkjax.text.events.Parser`.

    Subclasses give `control` (spellings that are one token where the tokenizer has it) and `read`.
    """

    control: tuple[str, ...] = ()
    hold = HOLD

    def __init__(self, setup: Setup):
        super().__init__()
        self.setup, self.tools = setup, setup.tools
        self._reading: Reading[None] | None = None
        self._out: list[Event] = []
        # The calls in question: where what was read of them began, and their events.
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

    def feed(self, text: str, control: bool | None = None) -> list[Event]:
        """See `Parser`."""
        if self._reading is None:
            self._begin(control is not None)
        self.append(text, bool(control))
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
        known = self.setup.controls
        if tokens:
            self.mark(s for s in self.control if known is None or s in known)
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
        self._machine.argue(f"{lead}{written(key)}: ")

    def value(self, text: str) -> None:
        """More of its value, JSON text."""
        self._machine.argue(text)

    def close(self) -> None:
        """The object is complete."""
        self._machine.argue("{}" if self._empty else "}")
