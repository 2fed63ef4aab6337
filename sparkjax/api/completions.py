"""/v1/completions: from its JSON to prompts and options. Pure functions."""

from __future__ import annotations

import dataclasses
from typing import Any

from . import options, unsupported
from .errors import invalid, show, too_long
from .fields import Fields, token_ids
from .options import Options
from .served import ServedModel

MOST_PROMPTS = 1024
MOST_LOGPROBS = 20
DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""

KNOWN = options.COMMON | {"prompt", "echo"}
MISPLACED: dict[str, tuple[Any, ...]] = {
    "messages": (),
    "max_completion_tokens": (),
    "top_logprobs": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "reasoning_effort": (),
    "chat_template_kwargs": ({},),
    "enable_thinking": (),
    "thinking": (),
    "thinking_budget": (),
}


@dataclasses.dataclass(frozen=True)
class CompletionRequest:
    """A checked request; every prompt is text or token ids."""

    prompts: tuple[str | tuple[int, ...], ...]
    echo: bool
    options: Options


def parse(body: dict[str, Any], served: ServedModel, fresh_seed: int) -> CompletionRequest:
    """A checked completion request.

    Raises:
      ApiError: 400 or 404, naming the field.
    """
    fields = Fields(body)
    options.check_model(fields, served)
    unsupported.check(body, KNOWN, MISPLACED)
    return CompletionRequest(
        prompts=parse_prompts(fields, served),
        echo=fields.boolean("echo", False),
        options=options.read(
            fields,
            served,
            fresh_seed,
            fields.integer("max_tokens", 0, options.LARGEST, DEFAULT_MAX_TOKENS),
            fields.integer("logprobs", 0, MOST_LOGPROBS),
        ),
    )


def parse_prompts(fields: Fields, served: ServedModel) -> tuple[str | tuple[int, ...], ...]:
    """The field `prompt` in any of its four forms."""
    allowed = "a non-empty string, an array of such strings, token ids, or an array of such arrays"
    value = fields.values.get("prompt")
    if isinstance(value, str) and value:
        return (value,)
    if not isinstance(value, list) or not value:
        raise fields.wrong("prompt", allowed)
    if isinstance(value[0], str | list):
        if len(value) > MOST_PROMPTS:
            raise fields.wrong("prompt", f"at most {MOST_PROMPTS} prompts")
        return tuple(_prompt(each, f"prompt[{i}]", served, allowed) for i, each in enumerate(value))
    return (_ids(value, "prompt", served),)


def _prompt(value: Any, where: str, served: ServedModel, allowed: str) -> str | tuple[int, ...]:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value:
        return _ids(value, where, served)
    raise invalid(where, f"is {show(value)}; allowed: {allowed}")


def _ids(value: list[Any], where: str, served: ServedModel) -> tuple[int, ...]:
    if len(value) > served.context:
        raise too_long("prompt", len(value), served.context)
    return token_ids(value, where, served.vocab_size)
