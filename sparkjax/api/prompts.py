"""From a request's words to token ids, within bounds. Runs off the event loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sparkjax.text.deepseek import DeepSeekEncoder
from sparkjax.text.parsing import Start
from sparkjax.text.template import TemplateError, shield_messages
from sparkjax.text.thinking import start_of

from .errors import ApiError, invalid, too_long
from .served import ServedModel

CHARACTERS = 8
"""Characters a token in the first look at a long text."""
SLACK = 256
"""Tokens by which the count of a text's beginning may exceed that of the same place in the whole:
the last word is cut there, and so may be a control token."""


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Token ids, where they came from, and how many in front the server added.

    Attributes:
      start: of a conversation: whether it leaves the model in reasoning.
    """

    tokens: tuple[int, ...]
    given: str | None = None
    added: int = 0
    start: Start = "content"


def from_messages(
    served: ServedModel,
    messages: Sequence[dict[str, Any]],
    limit: int,
    add_generation_prompt: bool = True,
    tools: Sequence[dict[str, Any]] | None = None,
    names: Mapping[str, Any] | None = None,
) -> Prompt:
    """The prompt of a conversation.

    Control tokens that a message or tool spells are ordinary text: nobody closes a turn from
    inside one.

    Args:
      tools: as templates want them.
      names: what else the template is told.

    Raises:
      ApiError: the template refuses the messages, or they are longer than `limit` tokens.
    """
    assert served.template is not None
    template = served.template
    shielded = shield_messages(served.tokenizer, list(messages), (), template.keeps_tags)
    try:
        text = template.render(
            shielded,
            add_generation_prompt=add_generation_prompt,
            tools=shield_messages(served.tokenizer, list(tools)) if tools else None,
            **(names or {}),
        )
    except TemplateError as error:
        raise invalid("messages", f"cannot be rendered: {error}") from None
    ids = _encode(served.tokenizer.encode_rendered, text, limit, "messages")
    if not ids:
        raise invalid("messages", "render to an empty prompt")
    start: Start = (
        template.start(text)
        if isinstance(template, DeepSeekEncoder)
        else start_of(text, served.thinking.tags)
    )
    return Prompt(tuple(ids), start=start)


def from_raw(
    served: ServedModel, prompt: str | tuple[int, ...], limit: int, add_special: bool = True
) -> Prompt:
    """The prompt of a completion: what the model reads, as it is.

    A text may spell control tokens, as other engines allow it: clients that render templates
    themselves send such texts, and nobody else's words are in them that they did not put there.

    Raises:
      ApiError: it is longer than `limit` tokens.
    """
    if not isinstance(prompt, str):
        if len(prompt) > limit:
            raise too_long("prompt", len(prompt), limit)
        return Prompt(prompt)
    tokenizer = served.tokenizer
    ids = _encode(tokenizer.encode_rendered, prompt, limit, "prompt")
    bos = tokenizer.bos_id if add_special and tokenizer.add_bos else None
    if bos is None or ids[:1] == [bos]:
        return Prompt(tuple(ids), prompt)
    return Prompt((bos, *ids), prompt, added=1)


def _encode(encode: Callable[[str], list[int]], text: str, limit: int, param: str) -> list[int]:
    """Token ids of a text, in time bounded by `limit`: a text that cannot fit is refused by its
    beginning."""
    size = CHARACTERS * limit + 1024
    while size < len(text):
        count = len(encode(text[:size])) - SLACK
        if count > limit:
            raise too_long(param, count, limit, exact=False)
        size *= 4
    ids = encode(text)
    if len(ids) > limit:
        raise too_long(param, len(ids), limit)
    return ids


def refused(reason: str, param: str) -> ApiError:
    """The engine's refusal ("field: message") as a client reads it.

    Args:
      param: what the endpoint calls its prompt.
    """
    field, _, message = reason.partition(": ")
    name = {"prompt": param}.get(field, field)
    return ApiError(400, f"{name}: {message}", param=name, code="context_length_exceeded")
