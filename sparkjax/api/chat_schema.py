"""The OpenAPI description of conversations: messages, tools, reasoning."""

from __future__ import annotations

from sparkjax.text.thinking import EFFORTS

from . import messages, tools
from .openapi_parts import Schema, integer, nullable, record
from .served import ServedModel
from .thinking import HISTORY, LARGEST, SWITCHES

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}


def message() -> Schema:
    """A message of a request."""

    def parts(*kinds: Schema) -> Schema:
        return {"anyOf": [TEXT, {"type": "array", "items": {"anyOf": list(kinds)}}]}

    text = _part("text")
    name = nullable(TEXT)
    asked = parts(text, _part("refusal"), _part("thinking"), _named("redacted_thinking"))
    calls = {"type": "array", "minItems": 1, "maxItems": messages.MOST_CALLS, "items": _past_call()}
    answer: Schema = {
        "role": {"const": "assistant"}, "name": name, "refusal": name, "reasoning_content": name,
        "reasoning": name,
    }  # fmt: skip
    return {
        "anyOf": [
            record({"role": {"enum": ["developer", "system", "user", "latest_reminder"]},
                    "content": parts(text), "name": name}, ["role", "content"]),
            record(answer | {"content": asked}, ["role", "content"]),
            record(answer | {"content": nullable(asked), "tool_calls": calls}, ["role", "tool_calls"]),
            record({"role": {"const": "tool"}, "content": parts(text), "tool_call_id": TEXT,
                    "name": name}, ["role", "content", "tool_call_id"]),
        ]
    }  # fmt: skip


def _named(kind: str) -> Schema:
    return record({"type": {"const": kind}}, ["type"])


def _part(kind: str) -> Schema:
    return record({"type": {"const": kind}, kind: TEXT}, ["type", kind])


def _past_call() -> Schema:
    name = {"type": "string", "minLength": 1}
    arguments = {
        "anyOf": [{"type": ["object", "null"]}, {"enum": ["{}", ""]}],
        "description": "an object or its JSON text",
    }
    function = record({"name": name, "arguments": arguments}, ["name"])
    custom = record({"name": name, "input": TEXT}, ["name", "input"])
    return {
        "anyOf": [
            record({"type": {"enum": ["function", None]}, "id": nullable(TEXT), "function": function}, ["function"]),
            record({"type": {"const": "custom"}, "id": TEXT, "custom": custom}, ["id", "type", "custom"]),
        ]
    }  # fmt: skip


def tool_fields() -> Schema:
    """Fields of a request about tools. That they go together a schema cannot say."""
    name = {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"}
    parameters = {"type": "object", "properties": {"type": {"const": "object"}}}
    function = record(
        {"name": name, "description": nullable(TEXT), "parameters": nullable(parameters),
         "strict": nullable(FLAG)}, ["name"]
    )  # fmt: skip
    custom = record({"name": name, "description": nullable(TEXT)}, ["name"])
    one = {
        "anyOf": [
            record({"type": {"const": "function"}, "function": function}, ["type", "function"]),
            record({"type": {"const": "custom"}, "custom": custom}, ["type", "custom"]),
        ]
    }
    choice = {
        "anyOf": [
            {"enum": ["none", "auto", "required"]},
            record({"type": {"const": "function"}, "function": record({"name": name}, ["name"])},
                   ["type", "function"]),
            record({"type": {"const": "custom"}, "custom": record({"name": name}, ["name"])},
                   ["type", "custom"]),
            record({"type": {"const": "allowed_tools"}, "allowed_tools": record(
                {"mode": {"enum": ["auto", "required"]},
                 "tools": {"type": "array", "minItems": 1, "items": {"type": "object"}}}, ["tools"])},
                   ["type", "allowed_tools"]),
        ]
    }  # fmt: skip
    return {
        "tools": nullable({"type": "array", "maxItems": tools.MOST_TOOLS, "items": one}),
        "tool_choice": nullable(choice),
        "parallel_tool_calls": nullable({"type": "boolean", "default": True}),
    }


def thinking_fields(served: ServedModel) -> Schema:
    """Fields of a request about reasoning."""
    effort = {"enum": list(EFFORTS)}
    budget = nullable(integer(1, LARGEST, None, "tokens of reasoning"))
    switches = {name: nullable(FLAG) for name in (*SWITCHES, *HISTORY)}
    more = {
        name: nullable({"type": ["string", "number", "boolean"]})
        for name in sorted(served.template_names - switches.keys() - {"reasoning_effort"})
    }
    named = switches | more | {"reasoning_effort": nullable({"anyOf": [effort, {"type": "integer"}]})}
    kwargs = {"type": "object", "properties": named, "additionalProperties": False}
    kinds = {"enum": ["enabled", "disabled", "adaptive", "auto"]}
    thinking = {"anyOf": [FLAG, record({"type": kinds, "budget_tokens": budget}, ["type"])]}
    return {
        "reasoning_effort": nullable(effort),
        "chat_template_kwargs": nullable(kwargs),
        "enable_thinking": nullable(FLAG),
        "thinking": nullable(thinking),
        "thinking_budget": budget,
    }


def answer() -> Schema:
    """The message of a choice."""
    call = {
        "anyOf": [
            record({"id": TEXT, "type": {"const": kind}, kind: record({"name": TEXT, field: TEXT},
                   ["name", field])}, ["id", "type", kind])
            for kind, field in (("function", "arguments"), ("custom", "input"))
        ]
    }  # fmt: skip
    return record(
        {"role": {"const": "assistant"}, "content": nullable(TEXT), "refusal": {"type": "null"},
         "reasoning_content": TEXT, "tool_calls": {"type": "array", "items": call}},
        ["role", "content"],
    )  # fmt: skip
