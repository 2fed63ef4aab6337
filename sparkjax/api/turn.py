"""From a checked chat request of any surface to what the engine is asked for."""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
from collections.abc import Callable
from typing import Any

from sparkjax.text.parsing import Machine, Setup

from . import prompts, structured
from .chat import ChatRequest
from .front import Front
from .job import Work
from .prompts import Prompt
from .served import ServedModel
from .structured import Constraint


async def turn(front: Front, asked: ChatRequest) -> Work:
    """The work of one turn of a conversation; its prompt is rendered off the event loop.

    Raises:
      ApiError: the template refuses the messages, or they are too long.
    """
    served = front.served
    prompt = await front.off_loop(
        prompts.from_messages,
        served,
        asked.messages,
        front.longest,
        True,
        asked.toolbox.declared,
        asked.thinking.names | _told(served, asked),
    )
    constraint = structured.with_tools(
        asked.options.constraint, asked.toolbox, served, prompt.start
    )
    options = dataclasses.replace(asked.options, constraint=constraint)
    return Work(
        (prompt,),
        options,
        "messages",
        False,
        asked.options.prompt_logprobs,
        parser=parsers(served, asked, prompt),
        one_call=not asked.toolbox.parallel,
        budget=asked.thinking.budget,
        close=tuple(served.tokenizer.encode_rendered(_close(served, constraint))),
    )


def _close(served: ServedModel, constraint: Constraint | None) -> str:
    """What the server ends reasoning with."""
    calls = constraint is not None and constraint.wanted.kind == "calls"
    return (calls and served.format.close_to_call) or served.format.close


def _control(served: ServedModel) -> frozenset[str]:
    """Control tokens of the format that the tokenizer has."""
    known = served.format.parser.control
    return frozenset(tag for tag in known if served.tokenizer.token_id(tag) is not None)


def _told(served: ServedModel, asked: ChatRequest) -> dict[str, Any]:
    """What the prompt itself has to say of the request, for the templates that read it."""
    told: dict[str, Any] = {}
    reads, constraint = getattr(served.template, "reads", ()), asked.options.constraint
    # Beside reasoning the grammar alone sees to the call: the prompt cannot open it yet.
    if "tool_choice" in reads and asked.toolbox.mode == "required" and asked.thinking.on is False:
        told["tool_choice"] = "required"
    if "response_format" in reads and constraint is not None:
        if constraint.wanted.kind == "json_object":
            told["response_format"] = {"type": "json_object"}
        elif constraint.wanted.kind == "json_schema":
            schema = {"schema": constraint.wanted.value}
            told["response_format"] = {"type": "json_schema", "json_schema": schema}
    return told


def parsers(served: ServedModel, asked: ChatRequest, prompt: Prompt) -> Callable[[int], Machine]:
    """Makes the parser of each choice. Ids of calls follow from the request, choice and number."""
    request = secrets.token_hex(16)
    format, control = served.format, _control(served)

    def make(choice: int) -> Machine:
        def new_id(number: int) -> str:
            words = f"{request}.{choice}.{number}".encode()
            return "call_" + hashlib.blake2b(words, digest_size=8).hexdigest()

        return format.make(Setup(asked.toolbox.tools, prompt.start, control, new_id))

    return make
