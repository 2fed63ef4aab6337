"""The field `messages`: from JSON to plain conversations that a template renders. Pure functions."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from sparkjax.text.deepseek import DeepSeekEncoder
from sparkjax.text.template import ChatTemplate

from .errors import invalid, missing, show, unsupported
from .fields import Fields

ROLES = ("developer", "system", "user", "assistant", "tool", "latest_reminder")
MOST_MESSAGES = 10_000
MOST_CALLS = 1024
"""Calls of one message."""
Message = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Rules:
    """What a model's template takes; see the attributes of `ChatTemplate`."""

    joiner: str = ""
    continues: bool = False
    any_arguments: bool = False

    @classmethod
    def of(cls, template: ChatTemplate | DeepSeekEncoder | None) -> Rules:
        """Those of a template."""
        if template is None:
            return cls()
        return cls(template.joiner, template.continues, template.any_arguments)


def parse_messages(fields: Fields, rules: Rules | None = None) -> tuple[Message, ...]:
    """The conversation.

    Every message has `role` and a string `content`. Calls have their arguments as objects (or as
    the text that came, where that is no object: a template may refuse it), under
    `tool_calls[].function`, custom ones too, as a function of one `input`.

    Raises:
      ApiError: 400, naming the message and its field.
    """
    rules = rules or Rules()
    given = fields.array("messages", MOST_MESSAGES)
    if not given:
        raise fields.wrong("messages", f"a non-empty array of at most {MOST_MESSAGES} messages")
    found = tuple(_message(message, f"messages[{i}]", rules) for i, message in enumerate(given))
    for i, message in enumerate(found):
        if message.get("prefix") and (not rules.continues or i + 1 < len(found)):
            raise unsupported(
                f"messages[{i}].prefix",
                "is true, which only the last message can be, of a model whose prompts allow it",
            )
    return found


def _message(value: Any, where: str, rules: Rules) -> Message:
    if not isinstance(value, dict):
        raise invalid(where, f"is {show(value)}; allowed: an object with role and content")
    fields = Fields(value, f"{where}.")
    role = fields.choice("role", ROLES)
    if role is None:
        raise fields.wrong("role", "one of " + ", ".join(ROLES))
    for key in ("function_call", "audio"):
        if value.get(key) is not None:
            raise unsupported(fields.name(key), "is not supported")
    # OpenAI's newer name for the system role; templates know the older one.
    message: Message = {"role": "system" if role == "developer" else role}
    if role == "assistant":
        _add_assistant(message, fields, rules)
    else:
        if value.get("tool_calls"):
            raise unsupported(fields.name("tool_calls"), "belongs to assistant messages")
        message["content"] = _content(fields, role, rules)
    name = fields.string("name")
    if name is not None:
        message["name"] = name
    if role == "tool":
        call = fields.string("tool_call_id")
        if call is None:
            raise missing(fields.name("tool_call_id"), "the id of the call that this answers")
        message["tool_call_id"] = call
    return message


def _add_assistant(message: Message, fields: Fields, rules: Rules) -> None:
    calls = [
        _call(call, f"{fields.name('tool_calls')}[{i}]", rules)
        for i, call in enumerate(fields.array("tool_calls", MOST_CALLS) or [])
    ]
    content, refusal = fields.values.get("content"), fields.string("refusal")
    thoughts: list[str] = []
    if content is None and (calls or refusal is not None):
        message["content"] = refusal or ""
    else:
        message["content"] = _content(fields, "assistant", rules, thoughts, bool(calls))
    # The template decides whether earlier reasoning is shown.
    reasoning = fields.string("reasoning_content")
    if reasoning is None:
        reasoning = fields.string("reasoning")
    if reasoning is None and thoughts:
        reasoning = "\n".join(thoughts)
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if fields.boolean("prefix", False):
        message["prefix"] = True
    if calls:
        message["tool_calls"] = calls


def _call(value: Any, where: str, rules: Rules) -> Message:
    if not isinstance(value, dict):
        raise invalid(where, f"is {show(value)}; allowed: an object")
    fields = Fields(value, f"{where}.")
    kind = fields.choice("type", ("function", "custom"), "function") or "function"
    inner = fields.object(kind)
    if inner is None:
        raise fields.wrong(kind, "an object")
    name = inner.string("name")
    if not name:
        raise inner.wrong("name", "the name of a tool")
    made: Message = {"type": "function"}
    id = fields.string("id")
    if id is not None:
        made["id"] = id
    elif kind == "custom":
        raise missing(fields.name("id"), "the id of the call")
    if kind == "custom":
        text = inner.string("input")
        if text is None:
            raise inner.wrong("input", "a string")
        made["function"] = {"name": name, "arguments": {"input": text}}
    else:
        made["function"] = {"name": name, "arguments": _arguments(inner, rules)}
    return made


def _arguments(fields: Fields, rules: Rules) -> Any:
    """The arguments of an earlier call: an object, or its JSON text, in the order of its keys."""
    value = fields.values.get("arguments")
    if isinstance(value, dict):
        return value
    allowed = "an object or the JSON text of one"
    if value is None or value == "":
        return {}
    if not isinstance(value, str):
        raise fields.wrong("arguments", allowed)
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        parsed = None
    if isinstance(parsed, dict):
        return parsed
    if rules.any_arguments:
        return value
    raise fields.wrong("arguments", allowed)


def _content(
    fields: Fields,
    role: str,
    rules: Rules,
    thoughts: list[str] | None = None,
    may_be_empty: bool = False,
) -> str:
    content = fields.values.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list) and (content or may_be_empty):
        parts = (
            _part(part, f"{fields.name('content')}[{i}]", role, thoughts)
            for i, part in enumerate(content)
        )
        return rules.joiner.join(part for part in parts if part is not None)
    raise fields.wrong("content", "a string or a non-empty array of text parts")


def _part(value: Any, where: str, role: str, thoughts: list[str] | None) -> str | None:
    if not isinstance(value, dict):
        raise invalid(where, f"is {show(value)}; allowed: an object with type and text")
    fields = Fields(value, f"{where}.")
    kind = fields.string("type")
    if kind is None:
        raise fields.wrong("type", '"text"')
    if fields.given("prompt_cache_breakpoint"):
        raise unsupported(fields.name("prompt_cache_breakpoint"), "is not supported")
    if kind in ("thinking", "redacted_thinking") and thoughts is not None:
        if kind == "thinking":
            thoughts.append(_text(fields, "thinking"))
        return None
    field = "refusal" if kind == "refusal" and role == "assistant" else "text"
    if kind not in ("text", field):
        raise invalid(
            fields.name("type"), f'is {show(kind)}, which is not supported; allowed: "text"',
            "unsupported_content_type",
        )  # fmt: skip
    return _text(fields, field)


def _text(fields: Fields, key: str) -> str:
    text = fields.string(key)
    if text is None:
        raise fields.wrong(key, "a string")
    return text
