"""Input items of the Responses API as chat messages. Pure functions.

What a model said in one turn comes back as several items (reasoning, message, calls); a chat
message holds them all, so neighbours are joined.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ..errors import ApiError, invalid, missing, show
from ..fields import Fields

ROLES = ("user", "assistant", "system", "developer")
TYPES = (
    "message", "reasoning", "function_call", "function_call_output", "custom_tool_call",
    "custom_tool_call_output",
)  # fmt: skip
Json = dict[str, Any]


@dataclasses.dataclass
class Conversation:
    """Chat messages under construction.

    Attributes:
      messages: as /v1/chat/completions takes them.
      origin: chat field -> the item it came from (see `Translation`).
    """

    messages: list[Json] = dataclasses.field(default_factory=list)
    origin: dict[str, str] = dataclasses.field(default_factory=dict)
    open: Json | None = None
    """The assistant message that further items may join."""

    def add(self, message: Json, where: str) -> Json:
        """Appends a message; nothing joins the one before it any more."""
        self.close()
        self.origin[f"messages[{len(self.messages)}]"] = where
        self.messages.append(message)
        self.open = message if message["role"] == "assistant" else None
        return message

    def call(self, call: Json, where: str) -> None:
        """Adds a call to the open assistant message, or to a new one."""
        turn = self.open or self.add({"role": "assistant", "content": None}, where)
        calls = turn.setdefault("tool_calls", [])
        name = f"messages[{len(self.messages) - 1}].tool_calls[{len(calls)}]"
        self.origin |= {name: where, f"{name}.id": f"{where}.call_id"}
        self.origin |= {f"{name}.{kind}": where for kind in ("function", "custom")}
        calls.append(call)

    def close(self) -> None:
        """Ends the open message. Reasoning without any words after it is no turn."""
        if self.open is not None and self.open["content"] is None and "tool_calls" not in self.open:
            self.messages.pop()
        self.open = None


def to_messages(items: list[Any], names: list[str]) -> Conversation:
    """Chat messages of input items.

    Args:
      names: how each item is called in errors, "input[0]".

    Raises:
      ApiError: 400, naming the item.
    """
    made = Conversation()
    for item, where in zip(items, names, strict=True):
        if not isinstance(item, dict):
            raise invalid(where, f"is {show(item)}; allowed: an object")
        _add(made, Fields(item, f"{where}."), where)
    made.close()
    return made


def _add(made: Conversation, item: Fields, where: str) -> None:
    kind = item.string("type") or ("message" if item.given("role") else None)
    match kind:
        case "message":
            _add_message(made, item, where)
        case "reasoning":
            _add_reasoning(made, item, where)
        case "function_call":
            call = {
                "id": _required(item, "call_id"),
                "type": "function",
                "function": {
                    "name": _required(item, "name"),
                    "arguments": _required(item, "arguments"),
                },
            }
            made.call(call, where)
        case "custom_tool_call":
            call = {
                "id": _required(item, "call_id"),
                "type": "custom",
                "custom": {"name": _required(item, "name"), "input": _required(item, "input")},
            }
            made.call(call, where)
        case "function_call_output" | "custom_tool_call_output":
            output = item.values.get("output")
            if not isinstance(output, str | list):
                raise item.wrong("output", "a string or an array of content parts")
            content = output if isinstance(output, str) else _parts(item, "output", "user")
            made.add(
                {"role": "tool", "tool_call_id": _required(item, "call_id"), "content": content},
                where,
            )
        case None:
            raise item.wrong("type", "one of " + ", ".join(TYPES))
        case _:
            raise unknown_item(item, kind)


def unknown_item(item: Fields, kind: str) -> ApiError:
    """The error of an item whose type is not known here."""
    return invalid(
        item.name("type"), f"is {show(kind)}, which is not supported; allowed: {', '.join(TYPES)}",
        "unsupported_content_type",
    )  # fmt: skip


def _add_message(made: Conversation, item: Fields, where: str) -> None:
    role = item.choice("role", ROLES)
    if role is None:
        raise item.wrong("role", "one of " + ", ".join(ROLES))
    content = item.values.get("content")
    if isinstance(content, list):
        content = _parts(item, "content", role)
    elif not isinstance(content, str):
        raise item.wrong("content", "a string or an array of content parts")
    turn = made.open
    if role != "assistant" or turn is None or turn["content"] is not None:
        if turn is not None and role == "assistant" and turn.get("tool_calls"):
            # Words after a call: one chat message has them in one place.
            turn["content"] = _text(turn["content"]) + _text(content)
            return
        made.add({"role": role, "content": content}, where)
        return
    turn["content"] = content


def _add_reasoning(made: Conversation, item: Fields, where: str) -> None:
    texts = []
    for field in ("content", "summary"):
        for i, part in enumerate(item.array(field, 10_000) or []):
            name = f"{item.name(field)}[{i}]"
            if not isinstance(part, dict):
                raise invalid(name, f"is {show(part)}; allowed: an object with type and text")
            texts.append(_required(Fields(part, f"{name}."), "text"))
        if texts:  # a summary only stands in where the words themselves are missing
            break
    text = "\n".join(texts)
    turn = made.open
    if turn is None or turn["content"] is not None or turn.get("tool_calls"):
        turn = made.add({"role": "assistant", "content": None}, where)
    if text:
        before = turn.get("reasoning_content")
        turn["reasoning_content"] = text if before is None else f"{before}\n{text}"


def _text(content: str | list[Json] | None) -> str:
    if isinstance(content, list):
        return "".join(part.get("text") or part.get("refusal") or "" for part in content)
    return content or ""


def _parts(item: Fields, field: str, role: str) -> list[Json]:
    return [
        _part(part, f"{item.name(field)}[{i}]", role)
        for i, part in enumerate(item.array(field, 10_000) or [])
    ]


def _part(value: Any, where: str, role: str) -> Json:
    if not isinstance(value, dict):
        raise invalid(where, f"is {show(value)}; allowed: an object with type and text")
    part = Fields(value, f"{where}.")
    kind = part.string("type")
    match kind:
        case "input_text" | "output_text" | "text":
            return {"type": "text", "text": _required(part, "text")}
        case "refusal" if role == "assistant":
            return {"type": "refusal", "refusal": _required(part, "refusal")}
        case "input_image":
            if not part.given("image_url"):
                raise part.wrong("image_url", "an image's URL (file_id is not supported)")
            image = {"url": value["image_url"]}
            if part.given("detail"):
                image["detail"] = value["detail"]
            return {"type": "image_url", "image_url": image}
        case "input_file":
            file = {k: value[k] for k in ("file_data", "file_id", "filename") if k in value}
            return {"type": "file", "file": file}
        case None:
            raise part.wrong("type", '"input_text"')
        case _:
            raise invalid(
                part.name("type"), f'is {show(kind)}, which is not supported; allowed: "input_text"',
                "unsupported_content_type",
            )  # fmt: skip


def _required(fields: Fields, key: str) -> str:
    value = fields.string(key)
    if value is None:
        raise missing(fields.name(key), "a string")
    return value
