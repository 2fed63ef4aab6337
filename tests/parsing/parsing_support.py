"""Cases of production parsers, and what it means that a message is the expected one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from sparkjax.text.events import Event, Message, fold
from sparkjax.text.parsing import FORMATS, Setup, Tool

DATA = Path(__file__).resolve().parents[1] / "data" / "parsing"
FORMAT_OF = {"deepseek_v4": "dsml", "deepseek_v41": "dsml_spaced", "llama_json": "llama"}
FAMILIES = ("glm", "qwen", "mimo", "hermes", "deepseek_v4", "deepseek_v41",
            "llama_json", "pythonic", "harmony")  # fmt: skip
Piece = tuple[bool | None, str]


class Case:
    """One case: what a model wrote, and the message that it is."""

    def __init__(self, family: str, toolsets: dict[str, Any], values: dict[str, Any]):
        self.family, self.values, self.id = family, values, values["id"]
        self.format = FORMATS[FORMAT_OF.get(family, family)]
        self.offered = toolsets[values["tools"]]
        self.finish = "length" if values["finish_reason"] == "length" else "stop"
        segments = values.get("segments")
        self.pieces: list[Piece] = (
            [(kind == "token", text) for kind, text in segments]
            if segments
            else [(None, values["input"])]
        )

    @property
    def text(self) -> str:
        return "".join(text for _, text in self.pieces)

    def tokens(self) -> list[Piece]:
        """The pieces as an engine gives them: the format's control tokens apart."""
        if self.pieces[0][0] is not None:
            return self.pieces
        return apart(self.format.name, self.text)

    def setup(self) -> Setup:
        start = "content"
        if self.values["thinking"]:
            start = "auto" if self.family == "mimo" else "reasoning"
        return Setup(tools=offered(self.offered), start=start)  # type: ignore[arg-type]

    def events(self, pieces: list[Piece]) -> list[Event]:
        return parse(self.format.name, self.setup(), pieces, self.finish)

    def message(self, pieces: list[Piece] | None = None) -> Message:
        return fold(self.events(self.pieces if pieces is None else pieces))

    def accepts(self, message: Message) -> bool:
        options = [self.values["expected"], *self.values.get("also", [])]
        return any(self._equal(message, each) for each in options) and self._open(message)

    def _equal(self, message: Message, expected: dict[str, Any]) -> bool:
        same = _squeezed if self.values.get("rule") == "order" else str.strip
        calls = [(c.name, json.loads(c.arguments)) for c in message.tool_calls if c.complete]
        wanted = [(c["name"], c["arguments"]) for c in expected["tool_calls"]]
        return (
            same(message.content) == same(expected["content"])
            and same(message.reasoning) == same(expected["reasoning"])
            and _ordered(calls) == _ordered(wanted)
        )

    def _open(self, message: Message) -> bool:
        """A call that was cut off is a beginning of the right one, and not a whole one."""
        for call in message.tool_calls:
            if not call.complete:
                cut = self.values["truncated_call"]
                whole = json.dumps(cut["arguments"], ensure_ascii=False)
                if call.name != cut["name"] or not whole.startswith(call.arguments):
                    return False
        return True


def offered(tools: list[dict[str, Any]]) -> dict[str, Tool]:
    return {t["function"]["name"]: Tool(t["function"]["parameters"]) for t in tools}


def parse(name: str, setup: Setup, pieces: list[Piece], finish: str) -> list[Event]:
    parser = FORMATS[name].make(setup)
    found = [event for control, text in pieces for event in parser.feed(text, control)]
    return found + parser.finish(finish)  # type: ignore[arg-type]


def apart(name: str, text: str) -> list[Piece]:
    """A text with the control tokens of a format apart, as an engine gives it."""
    control = FORMATS[name].parser.control
    longest_first = sorted(control, key=len, reverse=True)
    parts = (
        re.split("(" + "|".join(map(re.escape, longest_first)) + ")", text) if control else [text]
    )
    return [(part in control, part) for part in parts if part]


def cut(pieces: list[Piece], places: list[int]) -> list[Piece]:
    """The pieces cut again, each place so many characters after the last one; control tokens stay whole."""
    out: list[Piece] = []
    turn = 0
    for control, text in pieces:
        if control:
            out.append((control, text))
            continue
        while text:
            size = places[turn % len(places)]
            turn += 1
            out.append((control, text[:size]))
            text = text[size:]
    return out


def cases(*families: str) -> list[Case]:
    found = []
    for family in families or FAMILIES:
        values = json.loads((DATA / f"{family}.json").read_text())
        found += [Case(family, values["toolsets"], case) for case in values["cases"]]
    return found


def mutation(kind: str, text: str, at: int, end: int, other: str, place: int, char: str) -> str:
    """One way in which a model loses its way: a part of its text is left out, doubled, misspelled,
    or taken from another text."""
    return {
        "delete": text[:at] + text[end:],
        "double": text[:end] + text[at:],
        "splice": text[:at] + other[place : place + 30] + text[at:],
        "replace": text[:at] + char + text[at + 1 :],
        "tail": text[:at] + other[place:],
        "cut": text[:at],
    }[kind]


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _ordered(value: Any) -> Any:
    """With the order of keys, and 1 equal to 1.0 but not to true."""
    if isinstance(value, dict):
        return [[key, _ordered(item)] for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [_ordered(item) for item in value]
    if isinstance(value, bool) or value is None:
        return repr(value)
    return value


TOOLS = offered(next(c for c in cases("glm") if c.values["tools"] == "main").offered)
CORPUS: dict[str, list[str]] = {name: [] for name in FORMATS}
for each in cases():
    if 0 < len(each.text) < 900:
        CORPUS[each.format.name].append(each.text)
CORPUS["plain"] = CORPUS["hermes"]
