"""The events of a streamed message, and the message that they build.

A whole message is what the events of the streamed one build. Event order and fields: Anthropic's
Messages API. Blocks never interleave.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from sparkjax.text.events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
)

from ..errors import ApiError
from ..wire import Usage
from .errors import error_body

Json = dict[str, Any]
DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""Block type -> (type of its deltas, their field)."""


class MessageStream:
    """One message while it is made.

    Args:
      key: what its id is made of.
    """

    def __init__(self, key: str, model: str):
        self.id, self._model = f"msg_{key}", model
        self._blocks: list[Json] = []
        self._texts: list[list[str]] = []
        self._complete: set[int] = set()
        self._open = False
        self._begun = False
        self._usage: Json = {}
        self._stop_reason: str | None = None
        self._stop_sequence: str | None = None

    # --- Events -----------------------------------------------------------------------------------

    def begin(self, usage: Usage) -> list[Json]:
        """The event before the first word; the prompt's tokens are known by then. Once."""
        if self._begun:
            return []
        self._begun = True
        self._usage = usage_json(usage) | {"output_tokens": 0}
        return [{"type": "message_start", "message": self._message([])}]

    def push(self, events: Iterable[Event]) -> list[Json]:
        """The events of what is new."""
        made: list[Json] = []
        for event in events:
            match event:
                case ContentDelta() if event.text:
                    made += self._delta({"type": "text", "text": ""}, event.text)
                case ReasoningDelta() if event.text:
                    block = {"type": "thinking", "thinking": "", "signature": ""}
                    made += self._delta(block, event.text)
                case ToolCallStart():
                    made += self._start(
                        {"type": "tool_use", "id": event.id, "name": event.name, "input": {}}
                    )
                case ToolArgumentsDelta() if event.text:
                    made.append(self._more(event.text))
                case ToolCallEnd():
                    self._complete.add(len(self._blocks) - 1)
                    made += self._stop()
        return made

    def end(self, finish: str | None, usage: Usage, stop_sequence: str | None) -> list[Json]:
        """The events after the last word.

        Args:
          finish: "length" wins over calls.
          stop_sequence: the stop string that ended it.
        """
        made = [*self.begin(usage), *self._stop()]
        self._usage = usage_json(usage)
        self._stop_sequence = stop_sequence
        if finish == "length":
            self._stop_reason = "max_tokens"
        elif self._complete:
            self._stop_reason = "tool_use"
        else:
            self._stop_reason = "end_turn" if stop_sequence is None else "stop_sequence"
        delta = {"stop_reason": self._stop_reason, "stop_sequence": stop_sequence}
        return [
            *made,
            {"type": "message_delta", "delta": delta, "usage": self._usage},
            {"type": "message_stop"},
        ]

    def fail(self, error: ApiError) -> list[Json]:
        """The last event of a message that broke off."""
        return [error_body(error)]

    # --- The message ------------------------------------------------------------------------------

    def message(self) -> Json:
        """The whole message. A call that the length limit cut off is left out: its arguments are
        no JSON."""
        return self._message([block for i in range(len(self._blocks)) if (block := self._block(i))])

    def _block(self, number: int) -> Json | None:
        block, text = dict(self._blocks[number]), "".join(self._texts[number])
        match block["type"]:
            case "tool_use":
                if number not in self._complete:
                    return None
                block["input"] = json.loads(text or "{}")
            case "thinking":
                block |= {"thinking": text, "signature": self._signature}
            case _:
                block["text"] = text
        return block

    def _message(self, content: list[Json]) -> Json:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": self._stop_reason,
            "stop_sequence": self._stop_sequence,
            "usage": self._usage,
        }

    # --- Their parts ------------------------------------------------------------------------------

    @property
    def _signature(self) -> str:
        # Clients send it back with the block and need one; nothing is checked by it here.
        return self.id

    def _start(self, block: Json) -> list[Json]:
        made = self._stop()
        self._blocks.append(block)
        self._texts.append([])
        self._open = True
        number = len(self._blocks) - 1
        made.append({"type": "content_block_start", "index": number, "content_block": dict(block)})
        if number == 0:
            made.append({"type": "ping"})
        return made

    def _delta(self, block: Json, text: str) -> list[Json]:
        made: list[Json] = []
        if not self._open or self._blocks[-1]["type"] != block["type"]:
            made += self._start(block)
        return [*made, self._more(text)]

    def _more(self, text: str) -> Json:
        self._texts[-1].append(text)
        kind, field = DELTAS[self._blocks[-1]["type"]]
        return self._block_delta({"type": kind, field: text})

    def _stop(self) -> list[Json]:
        if not self._open:
            return []
        self._open = False
        made = []
        if self._blocks[-1]["type"] == "thinking":
            made.append(self._block_delta({"type": "signature_delta", "signature": self._signature}))
        return [*made, {"type": "content_block_stop", "index": len(self._blocks) - 1}]

    def _block_delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}


def usage_json(usage: Usage) -> Json:
    """`usage` in this API's words: the prompt is input_tokens and cache_read_input_tokens."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
        "service_tier": "standard",
    }
