"""What an answer is made of, as it comes: the events that every API surface folds.

A parser turns generated text into events (sparkjax/text/parsing); a surface turns events into its
own chunks. A whole answer is the fold of the streamed one, so the two cannot differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Literal, Protocol

Kind = Literal["function", "custom"]
Finish = Literal["stop", "length"]


@dataclasses.dataclass(frozen=True)
class ContentDelta:
    """More of the visible answer.

    Attributes:
      at: place of the text in what the parser was fed, in characters; -1 is unknown. Text of one
        delta is contiguous there.
    """

    text: str
    at: int = dataclasses.field(default=-1, compare=False)


@dataclasses.dataclass(frozen=True)
class ReasoningDelta:
    """More of the reasoning in front of (or between parts of) the answer."""

    text: str


@dataclasses.dataclass(frozen=True)
class ToolCallStart:
    """A call begins.

    Attributes:
      index: 0, 1, ... in the order of the calls.
      id: names the call for its result.
      kind: a "custom" tool's arguments are one plain text, not JSON.
    """

    index: int
    id: str
    name: str
    kind: Kind = "function"


@dataclasses.dataclass(frozen=True)
class ToolArgumentsDelta:
    """More of a call's arguments. Up to `ToolCallEnd` they are a strict prefix of JSON text; those
    of a "custom" tool are its input, as it is."""

    index: int
    text: str
    kind: Kind = "function"


@dataclasses.dataclass(frozen=True)
class ToolCallEnd:
    """A call is complete. A call without this event was cut off by the length limit."""

    index: int


Event = ContentDelta | ReasoningDelta | ToolCallStart | ToolArgumentsDelta | ToolCallEnd


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A folded call.

    Attributes:
      arguments: JSON text of an object ("function") or plain text ("custom"). Never empty for a
        complete function call.
      complete: False for one that the length limit cut off.
    """

    id: str
    name: str
    arguments: str
    kind: Kind = "function"
    complete: bool = True


@dataclasses.dataclass(frozen=True)
class Message:
    """A folded answer."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


class Parser(Protocol):
    """Turns the text of one answer into events. Any cutting of the text folds to the same message."""

    def feed(self, text: str, control: bool | None = None) -> list[Event]:
        """Takes more text.

        Args:
          control: True where `text` spells one control token, False where it is ordinary text (in
            which a control token's spelling is no tag). None where only the text is known; tags
            are then found in it.
        """
        ...

    def finish(self, reason: Finish) -> list[Event]:
        """Takes the end of the answer; "length" is the token limit. Nothing is fed after it."""
        ...


class Fold:
    """Collects events into a Message, in time linear in their text."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._starts: list[ToolCallStart] = []
        self._arguments: list[list[str]] = []
        self._ended: set[int] = set()

    def add(self, event: Event) -> None:
        """Takes the next event."""
        match event:
            case ContentDelta():
                self._content.append(event.text)
            case ReasoningDelta():
                self._reasoning.append(event.text)
            case ToolCallStart():
                self._starts.append(event)
                self._arguments.append([])
            case ToolArgumentsDelta():
                self._arguments[event.index].append(event.text)
            case ToolCallEnd():
                self._ended.add(event.index)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fold) and self.message() == other.message()

    __hash__ = None  # type: ignore[assignment]

    def message(self) -> Message:
        """The message so far."""
        calls = (
            ToolCall(
                start.id,
                start.name,
                "".join(self._arguments[start.index]),
                start.kind,
                start.index in self._ended,
            )
            for start in self._starts
        )
        return Message("".join(self._content), "".join(self._reasoning), tuple(calls))


def fold(events: Iterable[Event]) -> Message:
    """The message that events make."""
    folded = Fold()
    for event in events:
        folded.add(event)
    return folded.message()
