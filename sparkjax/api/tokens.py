"""/tokenize, /detokenize and /tokenizer_info, in vLLM's shapes."""

from __future__ import annotations

from typing import Any

from . import options, prompts
from .errors import invalid, too_long
from .fields import Fields, token_ids
from .messages import Rules, parse_messages
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
            served,
            parse_messages(fields, Rules.of(served.template)),
            limit,
            add,
            parse_tools(fields).declared,
            names,
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


def tokenizer_info(served: ServedModel) -> dict[str, Any]:
    """What a client needs to prepare prompts itself: special tokens and the chat template."""
    tokenizer = served.tokenizer

    def name(id: int | None) -> str | None:
        return None if id is None else tokenizer.token_text(id)

    return {
        "tokenizer_class": type(tokenizer).__name__,
        "vocab_size": served.vocab_size,
        "model_max_length": served.context,
        "bos_token": name(tokenizer.bos_id),
        "eos_token": name(next(iter(tokenizer.eos_ids), None)),
        "pad_token": None,
        "add_bos_token": tokenizer.add_bos,
        "chat_template": served.template.source if served.template is not None else None,
    }
