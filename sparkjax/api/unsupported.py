"""Fields of the OpenAI API and its common extensions that are not implemented.

A field that would change the answer is never silently ignored: it is refused by name, unless its
value asks for what happens anyway. Names that nobody here knows are ignored, as OpenAI's own
clients and gateways add them freely.
"""

from __future__ import annotations

import logging
from typing import Any

from .errors import show, unsupported

log = logging.getLogger(__name__)

# Field -> the values that ask for nothing. null always is one.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    # tools
    "functions": ([],),
    "function_call": ("none", "auto"),
    "web_search_options": (),
    # reasoning and templates
    "reasoning": (),
    "include_reasoning": (True,),
    "chat_template": (),
    "documents": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (),
    # other kinds of input and output
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "prompt_embeds": (),
    "mm_processor_kwargs": ({},),
    "suffix": ("",),
    # other ways to choose tokens
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "min_tokens": (0,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "logits_processors": ([],),
    "typical_p": (1,),
    "mirostat": (0,),
    "truncate_prompt_tokens": (),
    # other ways to return them
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    # service
    "store": (False,),
    "background": (False,),
    "moderation": (),
    "verbosity": (),
    "prompt_cache_retention": (),
    "prompt_cache_options": (),
    "cache_salt": (),
    "priority": (0,),
    "lora": ([],),
}

_HINTS = {
    "max_completion_tokens": "belongs to /v1/chat/completions; use max_tokens",
    "top_logprobs": "belongs to /v1/chat/completions; logprobs takes the number here",
    "messages": "belongs to /v1/chat/completions; use prompt",
    "prompt": "belongs to /v1/completions; use messages",
    "echo": "belongs to /v1/completions",
}


def check(
    body: dict[str, Any], known: frozenset[str], misplaced: dict[str, tuple[Any, ...]]
) -> None:
    """Refuses what is not implemented.

    Args:
      known: the fields that the endpoint reads.
      misplaced: fields of the sister endpoint, with their neutral values here.

    Raises:
      ApiError: 400, naming the first such field.
    """
    unknown = []
    for name, value in body.items():
        if value is None or name in known:
            continue
        neutral = misplaced.get(name, NEUTRAL.get(name))
        if neutral is None:
            unknown.append(name)
        elif not any(_same(value, each) for each in neutral):
            hint = _HINTS.get(name, "is not supported")
            allowed = " or ".join(["null", *map(show_whole, neutral)])
            raise unsupported(name, f"{hint} (it is {show(value)}; allowed: {allowed})")
    if unknown and log.isEnabledFor(logging.DEBUG):
        log.debug("ignored unknown fields: %s", ", ".join(map(show, unknown)))


def show_whole(value: Any) -> str:
    """A neutral value, in full."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{show(k)}: {show(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(show, value)) + "]"
    return show(value)


def _same(value: Any, neutral: Any) -> bool:
    # 1 == True in Python, but not in JSON; 1 and 1.0 are one number.
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
