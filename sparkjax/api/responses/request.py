"""/v1/responses: from its JSON to a chat request and what the answer repeats. Pure functions."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..chat import KNOWN
from ..errors import invalid, show, unsupported
from ..fields import Fields
from ..translate import Translation, pass_on
from .items import to_messages

Json = dict[str, Any]

SAME = (
    "model", "temperature", "top_p", "metadata", "parallel_tool_calls", "user",
    "safety_identifier", "stream", "service_tier",
)  # fmt: skip
"""Fields that the chat API calls alike."""
EXTENSIONS = (
    "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed",
    "stop", "stop_token_ids", "ignore_eos", "logit_bias", "chat_template_kwargs", "structured_outputs",
    "guided_json", "guided_regex", "guided_choice", "guided_grammar",
)  # fmt: skip
"""Fields that OpenAI's Responses API lacks, and that mean what they mean in chat."""
INCLUDED = frozenset(
    ["message.output_text.logprobs", "reasoning.encrypted_content", "file_search_call.results",
     "web_search_call.results", "web_search_call.action.sources", "code_interpreter_call.outputs",
     "computer_call_output.output.image_url", "message.input_image.image_url"]
)  # fmt: skip
"""Values of `include`. Only log-probabilities change anything: reasoning is sent in clear, and what
the other tools would give is never there."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "conversation": (),
    "prompt": (),
    "max_tool_calls": (),
    "context_management": (),
    "moderation": (),
    "truncation": ("disabled",),
}
"""Fields that are not supported, with the values that ask for what happens anyway."""
HINTS = ("prompt_cache_key", "prompt_cache_retention")
"""Where OpenAI keeps a prompt: repeated in the response, and of no meaning here."""
READ = frozenset(
    [*SAME, *EXTENSIONS, *NEUTRAL, "input", "instructions", "previous_response_id", "store",
     "background", "include", "max_output_tokens", "reasoning", "text", "tools", "tool_choice",
     "top_logprobs", "stream_options", *HINTS]
)  # fmt: skip
LONGEST_ID = 64


@dataclasses.dataclass(frozen=True)
class ResponsesRequest:
    """A checked request.

    Attributes:
      translation: the chat request.
      items: its own input items, in the form that `input_items` lists.
      logprobs: whether the message's log-probabilities are sent.
      echo: the fields of the request that a response repeats.
    """

    translation: Translation
    items: tuple[Json, ...]
    previous: str | None
    store: bool
    background: bool
    stream: bool
    logprobs: bool
    echo: Json


def previous_id(body: Json) -> str | None:
    """The checked `previous_response_id`."""
    return Fields(body).string("previous_response_id", longest=LONGEST_ID)


def parse(body: Json, before: tuple[Json, ...] = ()) -> ResponsesRequest:
    """A checked request.

    Args:
      before: items of the conversation that `previous_response_id` names.

    Raises:
      ApiError: 400, naming the field.
    """
    fields = Fields(body)
    _refuse(fields)
    items = _items(fields)
    store = fields.boolean("store", True)
    background = fields.boolean("background", False)
    stream = fields.boolean("stream", False)
    if background and not store:
        raise invalid("background", "is true, which needs store to be true")
    logprobs = _logprobs(fields)
    chat, origin = _chat(fields, [*before, *items], len(before))
    if logprobs:
        chat |= {"logprobs": True, "top_logprobs": fields.values.get("top_logprobs")}
    return ResponsesRequest(
        translation=Translation(chat, origin),
        items=tuple(items),
        previous=previous_id(body),
        store=store,
        background=background,
        stream=stream,
        logprobs=logprobs,
        echo=_echo(fields, store, background),
    )


def count_fields(body: Json, before: tuple[Json, ...] = ()) -> Translation:
    """The chat request whose prompt /v1/responses/input_tokens counts.

    Raises:
      ApiError: 400, naming the field.
    """
    return parse(body, before).translation


def _refuse(fields: Fields) -> None:
    for name, neutral in NEUTRAL.items():
        value = fields.values.get(name)
        if value is not None and value not in neutral:
            allowed = " or ".join(["null", *map(show, neutral)])
            raise unsupported(name, f"is not supported (it is {show(value)}; allowed: {allowed})")
    for name in HINTS:
        fields.string(name, longest=1024)
    options = fields.object("stream_options")
    for name, value in (options.values if options is not None else {}).items():
        # Padding against guesses at token lengths: none is sent, so only false is honest.
        if value is not None and (name != "include_obfuscation" or not isinstance(value, bool)):
            raise unsupported(
                f"stream_options.{name[:64]}", f"is {show(value)}, which is not supported"
            )


def _items(fields: Fields) -> list[Json]:
    value = fields.values.get("input")
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list):
        raise fields.wrong("input", "a string or an array of items")
    return value


def _chat(fields: Fields, items: list[Any], before: int) -> tuple[Json, dict[str, str]]:
    """The chat body and the origin of its fields."""
    values = fields.values
    names = [
        f"previous_response_id.input[{i}]" if i < before else f"input[{i - before}]"
        for i in range(len(items))
    ]
    made = to_messages(items, names)
    messages, origin = made.messages, made.origin
    instructions = fields.string("instructions")
    if instructions is not None:
        messages = [{"role": "system", "content": instructions}, *messages]
        origin = {_moved(name): where for name, where in origin.items()}
        origin["messages[0]"] = "instructions"
    chat: Json = {name: values[name] for name in (*SAME, *EXTENSIONS) if name in values}
    chat["messages"] = messages
    chat["max_completion_tokens"] = values.get("max_output_tokens")
    origin |= {"messages": "input", "max_completion_tokens": "max_output_tokens"}
    origin["max_tokens"] = "max_output_tokens"
    _add_tools(fields, chat, origin)
    _add_format(fields, chat, origin)
    pass_on(values, chat, READ, KNOWN)
    effort = _effort(fields)
    if effort is not None:
        chat["reasoning_effort"] = effort
        origin["reasoning_effort"] = "reasoning.effort"
    return chat, origin


def _moved(name: str) -> str:
    """A message's name after one message came in front."""
    number, _, rest = name.removeprefix("messages[").partition("]")
    return f"messages[{int(number) + 1}]{rest}"


def _effort(fields: Fields) -> str | None:
    reasoning = fields.object("reasoning")
    if reasoning is None:
        return None
    for name in ("summary", "generate_summary"):  # the words themselves are sent instead
        reasoning.choice(name, ("auto", "concise", "detailed"))
    return reasoning.string("effort")


def _add_tools(fields: Fields, chat: Json, origin: dict[str, str]) -> None:
    tools = fields.array("tools", 10_000)
    if tools is not None:
        chat["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
        for i in range(len(tools)):
            origin |= {f"tools[{i}].{kind}": f"tools[{i}]" for kind in ("function", "custom")}
    choice = fields.values.get("tool_choice")
    if choice is not None:
        chat["tool_choice"] = _choice(choice)
        origin |= {f"tool_choice.{kind}": "tool_choice" for kind in ("function", "custom", "allowed_tools")}


def _tool(value: Any, where: str) -> Any:
    """A tool in chat's words; one that is no object is left for its parser to refuse."""
    if not isinstance(value, dict):
        raise invalid(where, f"is {show(value)}; allowed: an object")
    kind = value.get("type")
    if kind not in ("function", "custom"):
        raise unsupported(
            f"{where}.type", f'is {show(kind)}, which is not supported; allowed: "function", "custom"'
        )
    inner = {k: v for k, v in value.items() if k not in ("type", "defer_loading") and v is not None}
    form = inner.get("format")
    if kind == "custom" and isinstance(form, dict) and form.get("type") == "grammar":
        grammar = {k: v for k, v in form.items() if k != "type"}
        inner["format"] = {"type": "grammar", "grammar": grammar}
    return {"type": kind, kind: inner}


def _choice(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    kind = value.get("type")
    if kind in ("function", "custom"):
        return {"type": kind, kind: {"name": value.get("name")}}
    if kind == "allowed_tools":
        tools = value.get("tools")
        inner = {k: v for k, v in value.items() if k not in ("type", "tools")}
        inner["tools"] = [_choice(each) for each in tools] if isinstance(tools, list) else tools
        return {"type": kind, kind: inner}
    return value


def _add_format(fields: Fields, chat: Json, origin: dict[str, str]) -> None:
    text = fields.object("text")
    if text is None:
        return
    if text.given("verbosity"):
        chat["verbosity"] = text.string("verbosity")
        origin["verbosity"] = "text.verbosity"
    form = text.object("format")
    if form is None:
        return
    origin |= {"response_format": "text.format", "response_format.json_schema": "text.format"}
    if form.values.get("type") == "json_schema":
        inner = {k: v for k, v in form.values.items() if k != "type"}
        chat["response_format"] = {"type": "json_schema", "json_schema": inner}
    else:
        chat["response_format"] = form.values


def _logprobs(fields: Fields) -> bool:
    wanted = False
    for i, value in enumerate(fields.array("include", 64) or []):
        if not isinstance(value, str) or value not in INCLUDED:
            raise invalid(
                f"include[{i}]", f"is {show(value)}; allowed: {', '.join(sorted(INCLUDED))}"
            )
        wanted |= value == "message.output_text.logprobs"
    return bool(fields.integer("top_logprobs", 0, 20)) or wanted


def _echo(fields: Fields, store: bool, background: bool) -> Json:
    values = fields.values
    reasoning = values.get("reasoning") or {}
    text = values.get("text") or {}
    return {
        "background": background,
        "instructions": values.get("instructions"),
        "max_output_tokens": values.get("max_output_tokens"),
        "max_tool_calls": None,
        "metadata": values.get("metadata") or {},
        "parallel_tool_calls": values.get("parallel_tool_calls", True),
        "previous_response_id": values.get("previous_response_id"),
        "prompt_cache_key": values.get("prompt_cache_key"),
        "prompt_cache_retention": values.get("prompt_cache_retention"),
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "safety_identifier": values.get("safety_identifier"),
        "service_tier": "default",
        "store": store,
        "text": {"format": text.get("format") or {"type": "text"}, "verbosity": text.get("verbosity")},
        "tool_choice": values.get("tool_choice") or "auto",
        "tools": values.get("tools") or [],
        "top_logprobs": values.get("top_logprobs") or 0,
        "truncation": "disabled",
        "user": values.get("user"),
    }
