"""The events of a streamed response, and the response object that they build.

A whole response is what the events of the streamed one build, so the two cannot differ. Event
order and fields: OpenAI's Responses API.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from sparkjax.text.events import (
    ContentDelta,
    Event,
    Kind,
    ReasoningDelta,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
)

from ..errors import ApiError
from ..wire import Usage
from .parts import Call, Item, Message, Reasoning

Json = dict[str, Any]


class ResponseStream:
    """One response while it is made.

    Args:
      key: what its id and the ids of its items are made of.
      created: Unix time.
      echo: fields of the request that the response repeats.
      queued: it begins with status queued, for a background response.
    """

    def __init__(self, key: str, created: int, model: str, echo: Json, queued: bool = False):
        self.id = f"resp_{key}"
        self._key, self._created, self._model, self._echo = key, created, model, echo
        self.status = "queued" if queued else "in_progress"
        self._items: list[Item] = []
        self._open: Item | None = None
        self._scored: list[Json] = []
        self._number = 0
        self._usage: Json | None = None
        self._completed: int | None = None
        self._error: Json | None = None
        self._reason: str | None = None

    # --- Events -----------------------------------------------------------------------------------

    def begin(self) -> list[Json]:
        """The events before the first word."""
        events = [self._whole_event("created")]
        if self.status == "queued":
            events.append(self._whole_event("queued"))
            self.status = "in_progress"
        return [*events, self._whole_event("in_progress")]

    def push(self, events: Iterable[Event], scored: Sequence[Json] = ()) -> list[Json]:
        """The events of what is new.

        Args:
          scored: log-probabilities of visible tokens, in chat's form. They go with the text of the
            same call, or with the next.
        """
        self._scored += scored
        made: list[Json] = []
        for event in events:
            match event:
                case ContentDelta() if event.text:
                    made += self._text(Message, event.text)
                case ReasoningDelta() if event.text:
                    made += self._text(Reasoning, event.text)
                case ToolCallStart():
                    made += self._begin(Call(self._item_id("fc", event.kind), event))
                case ToolArgumentsDelta() if event.text and self._open is not None:
                    made += self._numbered(self._open.delta(event.text, self._place, []))
                case ToolCallEnd():
                    made += self._close("completed")
        return made

    def end(self, finish: str | None, usage: Usage) -> list[Json]:
        """The events after the last word.

        Args:
          finish: "length" leaves it incomplete.
        """
        cut = finish == "length"
        made = self._close("incomplete" if cut else "completed")
        self._reason = "max_output_tokens" if cut else None
        self.status = "incomplete" if cut else "completed"
        self._completed = int(time.time())
        self._usage = usage_json(usage)
        return [*made, self._whole_event(self.status)]

    def fail(self, error: ApiError) -> list[Json]:
        """The last event of a response that broke off."""
        self.status = "failed"
        self._error = {"code": error.code or "server_error", "message": error.message}
        return [self._whole_event("failed")]

    def cancel(self) -> None:
        """It is not finished, as its client wished."""
        if self.status in ("queued", "in_progress"):
            self._close("incomplete")
            self.status = "cancelled"

    # --- The response -----------------------------------------------------------------------------

    @property
    def output(self) -> list[Json]:
        """All items so far."""
        return [item.json() for item in self._items]

    def response(self) -> Json:
        """The response object as it is now."""
        done = self.status not in ("queued", "in_progress")
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": self.status,
            "completed_at": self._completed,
            "error": self._error,
            "incomplete_details": {"reason": self._reason} if self._reason else None,
            "model": self._model,
            "output": self.output if done else [],
            "usage": self._usage,
            **self._echo,
        }

    # --- Their parts ------------------------------------------------------------------------------

    @property
    def _place(self) -> int:
        return len(self._items) - 1

    def _item_id(self, prefix: str, kind: Kind = "function") -> str:
        prefix = "ctc" if kind == "custom" else prefix
        return f"{prefix}_{self._key}_{len(self._items)}"

    def _text(self, kind: type[Message] | type[Reasoning], text: str) -> list[Json]:
        made: list[Json] = []
        if not isinstance(self._open, kind):
            made += self._begin(kind(self._item_id(kind.prefix)))
        assert self._open is not None
        scored = []
        if kind is Message:
            scored, self._scored = self._scored, []
        return made + self._numbered(self._open.delta(text, self._place, scored))

    def _begin(self, item: Item) -> list[Json]:
        made = self._close("completed")
        self._items.append(item)
        self._open = item
        return made + self._numbered(item.begin(self._place))

    def _close(self, status: str) -> list[Json]:
        item, self._open = self._open, None
        if item is None:
            return []
        late = []
        if isinstance(item, Message) and self._scored:
            late, self._scored = item.delta("", self._place, self._scored), []
        return self._numbered(late + item.end(status, self._place))

    def _whole_event(self, name: str) -> Json:
        return self._numbered([{"type": f"response.{name}", "response": self.response()}])[0]

    def _numbered(self, events: list[Json]) -> list[Json]:
        for event in events:
            event["sequence_number"] = self._number
            self._number += 1
        return events


def usage_json(usage: Usage) -> Json:
    """`usage` in this API's words."""
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning or 0},
        "total_tokens": usage.prompt + usage.completion,
    }
