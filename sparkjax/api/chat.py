"""/v1/chat/completions: from its JSON to a conversation and options. Pure functions."""

from __future__ import annotations

import dataclasses
from typing import Any

from . import options, unsupported
from .errors import invalid
from .fields import Fields
from .messages import Rules, parse_messages
from .options import Options
from .served import ServedModel
from .thinking import Wanted, parse_thinking
from .tools import Toolbox, parse_tools

MOST_TOP_LOGPROBS = 20

KNOWN = options.COMMON | {
    "messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice",
    "parallel_tool_calls", "reasoning_effort", "chat_template_kwargs", "enable_thinking",
    "thinking", "thinking_budget",
}  # fmt: skip
MISPLACED: dict[str, tuple[Any, ...]] = {"prompt": (), "echo": (False,)}


@dataclasses.dataclass(frozen=True)
class ChatRequest:
    """A checked request; `messages` are plain, with string contents, ready for the template."""

    messages: tuple[dict[str, Any], ...]
    options: Options
    toolbox: Toolbox = dataclasses.field(default_factory=Toolbox)
    thinking: Wanted = dataclasses.field(default_factory=Wanted)


def parse(body: dict[str, Any], served: ServedModel, fresh_seed: int) -> ChatRequest:
    """A checked chat request.

    Raises:
      ApiError: 400 or 404, naming the field.
    """
    fields = Fields(body)
    options.check_model(fields, served)
    unsupported.check(body, KNOWN, MISPLACED)
    messages = parse_messages(fields, Rules.of(served.template))
    if served.template is None:
        raise invalid(
            "messages", "cannot be rendered: the model has no chat template; use /v1/completions",
            "no_chat_template",
        )  # fmt: skip
    return ChatRequest(
        messages,
        options.read(fields, served, fresh_seed, _max_tokens(fields), _logprobs(fields)),
        _toolbox(fields, served),
        parse_thinking(fields, served.thinking, served.template_names),
    )


def _toolbox(fields: Fields, served: ServedModel) -> Toolbox:
    toolbox = parse_tools(fields)
    if toolbox.offers and toolbox.mode != "none" and not served.format.calls:
        raise invalid(
            "tools",
            "cannot be used: the model's chat template writes no calls",
            "tools_unsupported",
        )
    return toolbox


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
