"""/tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from typing import Any

from . import options, prompts
from .errors import invalid, too_long
from .fields import Fields, token_ids
from .messages import parse_messages
from .served import ServedModel
from .thinking import parse_thinking
from .tools import parse_tools


def tokenize(body: dict[str, Any], served: ServedModel, limit: int) -> dict[str, Any]:
    """Token ids of a text (`prompt`) or a conversation (`messages`).

    A text gets the begin token as in a completion, unless `add_special_tokens` is false.
    """
    fields = Fields(body)
    if fields.given("model"):
        options.check_model(fields, served)
    if fields.given("prompt") == fields.given("messages"):
        raise invalid("prompt", "or messages: exactly one of them must be given")
    strings = fields.boolean("return_token_strs", False)
    if fields.given("messages"):
        if served.template is None:
            raise invalid("messages", "cannot be rendered: the model has no chat template")
        add = fields.boolean("add_generation_prompt", True)
        names = parse_thinking(fields, served.thinking, served.template_names).names
        found = prompts.from_messages(
            served, parse_messages(fields), limit, add, parse_tools(fields).declared, names
        ).tokens
    else:
        text = fields.string("prompt") or ""
        special = fields.boolean("add_special_tokens", True)
        found = prompts.from_raw(served, text, limit, special).tokens
    return {
        "count": len(found),
        "max_model_len": served.context,
        "tokens": list(found),
        "token_strs": [served.tokenizer.token_text(t) for t in found] if strings else None,
    }


def detokenize(body: dict[str, Any], served: ServedModel, limit: int) -> dict[str, Any]:
    """The text of token ids, control tokens spelled out."""
    fields = Fields(body)
    if fields.given("model"):
        options.check_model(fields, served)
    tokens = fields.values.get("tokens")
    if not isinstance(tokens, list):
        raise fields.wrong("tokens", "an array of token ids")
    if len(tokens) > limit:
        raise too_long("tokens", len(tokens), limit)
    ids = token_ids(tokens, "tokens", served.vocab_size)
    return {"prompt": served.tokenizer.decode(ids, skip_special=False)}
