"""Output items of a response: each knows its own events and its final form."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

from sparkjax.text.events import ToolCallStart

Json = dict[str, Any]


class Item(Protocol):
    """An output item. Every method that returns events leaves `sequence_number` to its caller;
    `place` is the item's `output_index`."""

    id: str

    def begin(self, place: int) -> list[Json]:
        """The item's first events."""
        ...

    def delta(self, text: str, place: int, scored: list[Json]) -> list[Json]:
        """More of it."""
        ...

    def end(self, status: str, place: int) -> list[Json]:
        """Its last events; status is completed or incomplete."""
        ...

    def json(self) -> Json:
        """The item as it is now."""
        ...


class _Text:
    """An item that holds one part of text."""

    prefix: ClassVar[str]
    part_type: ClassVar[str]

    def __init__(self, id: str):
        self.id, self.status = id, "in_progress"
        self._text: list[str] = []
        self._scored: list[Json] = []

    def begin(self, place: int) -> list[Json]:
        """See Item."""
        added = {"type": "response.output_item.added", "output_index": place, "item": self._shell([])}
        part = self._where(place, "response.content_part.added") | {"part": self._part("", [])}
        return [added, part]

    def delta(self, text: str, place: int, scored: list[Json]) -> list[Json]:
        """See Item."""
        self._text.append(text)
        self._scored += scored
        event = self._where(place, f"response.{self.part_type}.delta") | {"delta": text}
        return [event | self._extra(scored)]

    def end(self, status: str, place: int) -> list[Json]:
        """See Item."""
        self.status = status
        text = "".join(self._text)
        done = self._where(place, f"response.{self.part_type}.done") | {"text": text}
        part = self._where(place, "response.content_part.done")
        return [
            done | self._extra(self._scored),
            part | {"part": self._part(text, self._scored)},
            {"type": "response.output_item.done", "output_index": place, "item": self.json()},
        ]

    def json(self) -> Json:
        """See Item."""
        return self._shell([self._part("".join(self._text), self._scored)])

    def _where(self, place: int, kind: str) -> Json:
        return {"type": kind, "item_id": self.id, "output_index": place, "content_index": 0}

    def _extra(self, scored: list[Json]) -> Json:
        return {}

    def _part(self, text: str, scored: list[Json]) -> Json:
        return {"type": self.part_type, "text": text}

    def _shell(self, content: list[Json]) -> Json:
        raise NotImplementedError


class Message(_Text):
    """Words for the user."""

    prefix, part_type = "msg", "output_text"

    def _extra(self, scored: list[Json]) -> Json:
        return {"logprobs": list(scored)}

    def _part(self, text: str, scored: list[Json]) -> Json:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(scored)}

    def _shell(self, content: list[Json]) -> Json:
        head = {"type": "message", "id": self.id, "status": self.status, "role": "assistant"}
        return head | {"content": content}


class Reasoning(_Text):
    """Words before the answer, in clear."""

    prefix, part_type = "rs", "reasoning_text"

    def _shell(self, content: list[Json]) -> Json:
        head = {"type": "reasoning", "id": self.id, "status": self.status}
        return head | {"summary": [], "content": content}


class Call:
    """A call of a function or of a custom tool."""

    def __init__(self, id: str, start: ToolCallStart):
        self.id, self.status, self._start = id, "in_progress", start
        self._text: list[str] = []
        custom = start.kind == "custom"
        self._field = "input" if custom else "arguments"
        self._event = "response.custom_tool_call_input" if custom else "response.function_call_arguments"

    def begin(self, place: int) -> list[Json]:
        """See Item."""
        return [{"type": "response.output_item.added", "output_index": place, "item": self.json()}]

    def delta(self, text: str, place: int, scored: list[Json]) -> list[Json]:
        """See Item."""
        self._text.append(text)
        return [self._where(place, "delta") | {"delta": text}]

    def end(self, status: str, place: int) -> list[Json]:
        """See Item."""
        self.status = status
        done = self._where(place, "done") | {self._field: "".join(self._text)}
        if self._field == "arguments":
            done["name"] = self._start.name
        return [
            done,
            {"type": "response.output_item.done", "output_index": place, "item": self.json()},
        ]

    def json(self) -> Json:
        """See Item."""
        return {
            "type": "custom_tool_call" if self._field == "input" else "function_call",
            "id": self.id,
            "status": self.status,
            "call_id": self._start.id,
            "name": self._start.name,
            self._field: "".join(self._text),
        }

    def _where(self, place: int, what: str) -> Json:
        return {"type": f"{self._event}.{what}", "item_id": self.id, "output_index": place}
