"""/v1/chat/completions: from its JSON to a conversation and options. Pure functions."""

from __future__ import annotations

import dataclasses
from typing import Any

from . import options, unsupported
from .errors import invalid, missing, show
from .fields import Fields
from .options import Options
from .served import ServedModel

ROLES = ("developer", "system", "user", "assistant", "tool")
MOST_MESSAGES = 10_000
MOST_TOP_LOGPROBS = 20

KNOWN = options.COMMON | {"messages", "max_completion_tokens", "top_logprobs"}
MISPLACED: dict[str, tuple[Any, ...]] = {"prompt": (), "echo": (False,)}


@dataclasses.dataclass(frozen=True)
class ChatRequest:
    """A checked request; `messages` are plain, with string contents, ready for the template."""

    messages: tuple[dict[str, Any], ...]
    options: Options


def parse(body: dict[str, Any], served: ServedModel, fresh_seed: int) -> ChatRequest:
    """A checked chat request.

    Raises:
      ApiError: 400 or 404, naming the field.
    """
    fields = Fields(body)
    options.check_model(fields, served)
    unsupported.check(body, KNOWN, MISPLACED)
    messages = parse_messages(fields)
    if served.template is None:
        raise invalid(
            "messages", "cannot be rendered: the model has no chat template; use /v1/completions",
            "no_chat_template",
        )  # fmt: skip
    return ChatRequest(
        messages,
        options.read(fields, served, fresh_seed, _max_tokens(fields), _logprobs(fields)),
    )


def parse_messages(fields: Fields) -> tuple[dict[str, Any], ...]:
    """The field `messages`."""
    allowed = f"a non-empty array of at most {MOST_MESSAGES} messages"
    given = fields.array("messages", MOST_MESSAGES)
    if not given:
        raise fields.wrong("messages", allowed)
    return tuple(_message(message, f"messages[{i}]") for i, message in enumerate(given))


def _max_tokens(fields: Fields) -> int | None:
    if fields.given("max_tokens") and fields.given("max_completion_tokens"):
        raise invalid(
            "max_tokens", "and max_completion_tokens are both given; allowed: one of them"
        )
    new = fields.integer("max_completion_tokens", 1, options.LARGEST)
    return new if new is not None else fields.integer("max_tokens", 1, options.LARGEST)


def _logprobs(fields: Fields) -> int | None:
    wanted = fields.boolean("logprobs", False)
    top = fields.integer("top_logprobs", 0, MOST_TOP_LOGPROBS)
    if top and not wanted:
        raise invalid("top_logprobs", f"is {top}, which needs logprobs to be true")
    return (top or 0) if wanted else None


def _message(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise invalid(where, f"is {show(value)}; allowed: an object with role and content")
    fields = Fields(value, f"{where}.")
    role = fields.choice("role", ROLES) or ""
    if not role:
        raise fields.wrong("role", "one of " + ", ".join(ROLES))
    for key, neutral in (("tool_calls", []), ("function_call", None), ("audio", None)):
        if value.get(key) not in (None, neutral):
            raise unsupported.unsupported(fields.name(key), "is not supported")
    # OpenAI's newer name for the system role; templates know the older one.
    message: dict[str, Any] = {"role": "system" if role == "developer" else role}
    message["content"] = _content(fields, role)
    name = fields.string("name")
    if name is not None:
        message["name"] = name
    if role == "tool":
        call = fields.string("tool_call_id")
        if call is None:
            raise missing(fields.name("tool_call_id"), "the id of the call that this answers")
        message["tool_call_id"] = call
    if role == "assistant":
        reasoning = fields.string("reasoning_content")
        if reasoning is not None:  # the template decides whether earlier reasoning is shown
            message["reasoning_content"] = reasoning
    return message


def _content(fields: Fields, role: str) -> str:
    content = fields.values.get("content")
    refusal = fields.string("refusal") if role == "assistant" else None
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content:
        return "".join(
            _part(part, f"{fields.name('content')}[{i}]", role) for i, part in enumerate(content)
        )
    if content is None and refusal is not None:
        return refusal
    raise fields.wrong("content", "a string or a non-empty array of text parts")


def _part(value: Any, where: str, role: str) -> str:
    if not isinstance(value, dict):
        raise invalid(where, f"is {show(value)}; allowed: an object with type and text")
    fields = Fields(value, f"{where}.")
    kind = fields.string("type")
    if kind is None:
        raise fields.wrong("type", '"text"')
    field = "refusal" if kind == "refusal" and role == "assistant" else "text"
    if kind not in ("text", field):
        raise invalid(
            fields.name("type"), f'is {show(kind)}, which is not supported; allowed: "text"',
            "unsupported_content_type",
        )  # fmt: skip
    text = fields.string(field)
    if text is None:
        raise fields.wrong(field, "a string")
    return text
