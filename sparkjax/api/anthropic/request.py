"""/v1/messages: from its JSON to a chat request. Pure functions."""

from __future__ import annotations

import json
from typing import Any

from ..chat import KNOWN
from ..errors import invalid, missing, show, unsupported
from ..fields import Fields
from ..translate import Translation, pass_on

Json = dict[str, Any]

EXTENSIONS = (
    "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "ignore_eos",
    "stop_token_ids", "logit_bias", "chat_template_kwargs",
)  # fmt: skip
"""Fields that Anthropic's API lacks, and that mean what they mean in chat."""
REFUSED = ("container", "mcp_servers")
READ = frozenset(
    [*EXTENSIONS, *REFUSED, "model", "max_tokens", "messages", "system", "temperature", "top_p", "top_k",
     "stop_sequences", "stream", "service_tier", "metadata", "thinking", "output_config", "tools",
     "tool_choice"]
)  # fmt: skip
MOST = 100_000
"""Messages, and blocks of a message: Anthropic's own limit."""
BLOCKS = ("text", "image", "tool_use", "tool_result", "thinking", "redacted_thinking")


def parse(body: Json, thinks: bool = True, counts: bool = False) -> Translation:
    """The chat request of a message request.

    Args:
      thinks: the model can reason. For one that cannot, `thinking` is checked and left out: this
        API's clients send it to every model.
      counts: only its prompt is counted; `max_tokens` may be missing.

    Raises:
      ApiError: 400, naming the field.
    """
    fields = Fields(body)
    for name in REFUSED:
        if body.get(name) not in (None, []):
            raise unsupported(name, f"is not supported (it is {show(body[name])}; allowed: null)")
    chat: Json = {name: body[name] for name in EXTENSIONS if name in body}
    origin: dict[str, str] = {}
    if "model" in body:
        chat["model"] = body["model"]
    limit = fields.integer("max_tokens", 1, 2**31 - 1)
    if limit is None and not counts:
        raise missing("max_tokens", f"an integer from 1 to {2**31 - 1}")
    chat["max_tokens"] = limit
    _add_sampling(fields, chat, origin)
    _add_messages(fields, chat, origin)
    _add_tools(fields, chat, origin)
    _add_thinking(fields, chat, origin)
    pass_on(body, chat, READ, KNOWN)
    if not thinks:
        chat.pop("thinking", None)
    return Translation(chat, origin)


def _add_sampling(fields: Fields, chat: Json, origin: dict[str, str]) -> None:
    for name in ("temperature", "top_p"):
        if fields.given(name):
            chat[name] = fields.number(name, 0, 1, 1)
    if fields.given("top_k"):
        chat["top_k"] = fields.integer("top_k", 0, 2**31 - 1)
    if fields.given("stop_sequences"):
        chat["stop"] = fields.array("stop_sequences", MOST)
        origin["stop"] = "stop_sequences"
    chat["stream"] = fields.boolean("stream", False)
    fields.choice("service_tier", ("auto", "standard_only"))
    metadata = fields.object("metadata")
    if metadata is not None and metadata.given("user_id"):
        chat["user"] = metadata.string("user_id")
        origin["user"] = "metadata.user_id"


def _add_thinking(fields: Fields, chat: Json, origin: dict[str, str]) -> None:
    thinking = fields.object("thinking")
    if thinking is not None:
        kind = thinking.choice("type", ("enabled", "disabled", "adaptive"))
        if kind is None:
            raise thinking.wrong("type", "one of enabled, disabled, adaptive")
        chat["thinking"] = {"type": kind}
        if kind == "enabled":
            budget = thinking.integer("budget_tokens", 1, 2**31 - 1)
            if budget is not None:
                chat["thinking"]["budget_tokens"] = budget
    config = fields.object("output_config")
    if config is None:
        return
    if config.given("effort"):
        chat["reasoning_effort"] = config.string("effort")
        origin["reasoning_effort"] = "output_config.effort"
    form = config.object("format")
    if form is not None:
        if form.choice("type", ("json_schema",)) is None or not form.given("schema"):
            raise form.wrong("schema", 'a JSON schema beside "type": "json_schema"')
        inner = {"name": "answer", "strict": True, "schema": form.values["schema"]}
        chat["response_format"] = {"type": "json_schema", "json_schema": inner}
        origin["response_format.json_schema.schema"] = "output_config.format.schema"
        origin["response_format.json_schema"] = "output_config.format.schema"
        origin["response_format"] = "output_config.format"


def _add_tools(fields: Fields, chat: Json, origin: dict[str, str]) -> None:
    tools = fields.array("tools", 10_000)
    if tools:
        chat["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
        for i in range(len(tools)):
            origin[f"tools[{i}].function.parameters"] = f"tools[{i}].input_schema"
            origin[f"tools[{i}].function"] = f"tools[{i}]"
    choice = fields.object("tool_choice")
    if choice is None:
        return
    kind = choice.choice("type", ("auto", "any", "tool", "none"))
    if kind is None:
        raise choice.wrong("type", "one of auto, any, tool, none")
    if kind == "tool":
        name = choice.string("name")
        if name is None:
            raise choice.wrong("name", "the name of one of the tools")
        chat["tool_choice"] = {"type": "function", "function": {"name": name}}
        origin["tool_choice.function"] = "tool_choice"
    else:
        chat["tool_choice"] = {"any": "required"}.get(kind, kind)
    if choice.boolean("disable_parallel_tool_use", False):
        chat["parallel_tool_calls"] = False
        origin["parallel_tool_calls"] = "tool_choice.disable_parallel_tool_use"


def _tool(value: Any, where: str) -> Json:
    if not isinstance(value, dict):
        raise invalid(where, f"is {show(value)}; allowed: an object")
    tool = Fields(value, f"{where}.")
    kind = tool.string("type")
    if kind not in (None, "custom"):
        raise unsupported(tool.name("type"), f'is {show(kind)}, which is not supported; allowed: "custom"')
    function = {"name": value.get("name"), "parameters": value.get("input_schema")}
    if function["parameters"] is None:
        raise tool.wrong("input_schema", "a JSON schema")
    function |= {k: value[k] for k in ("description", "strict") if value.get(k) is not None}
    return {"type": "function", "function": function}


# --- Messages -------------------------------------------------------------------------------------


def _add_messages(fields: Fields, chat: Json, origin: dict[str, str]) -> None:
    made: list[Json] = []
    system = fields.values.get("system")
    if system is not None:
        origin[f"messages[{len(made)}]"] = "system"
        made.append({"role": "system", "content": _system(fields, system)})
    given = fields.array("messages", MOST)
    if not given:
        raise fields.wrong("messages", "a non-empty array of messages")
    for i, value in enumerate(given):
        where = f"messages[{i}]"
        if not isinstance(value, dict):
            raise invalid(where, f"is {show(value)}; allowed: an object with role and content")
        message = Fields(value, f"{where}.")
        role = message.choice("role", ("user", "assistant", "system"))
        if role is None:
            raise message.wrong("role", "one of user, assistant")
        new = _assistant(message) if role == "assistant" else _user(message, role)
        for each in new:
            origin[f"messages[{len(made)}]"] = where
            made.append(each)
    if made[-1]["role"] == "assistant":
        raise unsupported(
            f"messages[{len(given) - 1}]", "is the assistant's: an answer cannot be begun for it; "
            "allowed: a last message of the user",
        )  # fmt: skip
    chat["messages"] = made


def _system(fields: Fields, value: Any) -> str | list[Json]:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise fields.wrong("system", "a string or an array of text blocks")
    return [_text_block(block) for block in _blocks(fields, "system", ("text",))]


def _blocks(message: Fields, field: str, allowed: tuple[str, ...]) -> list[Fields]:
    found = []
    for i, value in enumerate(message.array(field, MOST) or []):
        where = f"{message.name(field)}[{i}]"
        if not isinstance(value, dict):
            raise invalid(where, f"is {show(value)}; allowed: a content block")
        block = Fields(value, f"{where}.")
        kind = block.string("type")
        if kind is None:
            raise block.wrong("type", "one of " + ", ".join(allowed))
        if kind not in allowed:
            raise invalid(
                block.name("type"), f"is {show(kind)}, which is not supported; allowed: {', '.join(allowed)}",
                "unsupported_content_type",
            )  # fmt: skip
        found.append(block)
    return found


def _text_block(block: Fields) -> Json:
    return {"type": "text", "text": _required(block, "text")}


def _user(message: Fields, role: str) -> list[Json]:
    """Results of calls first, each a message of its own; then what the user says."""
    content = message.values.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list) or not content:
        raise message.wrong("content", "a string or a non-empty array of content blocks")
    results, parts = [], []
    for block in _blocks(message, "content", ("text", "image", "tool_result")):
        match block.values["type"]:
            case "text":
                parts.append(_text_block(block))
            case "image":
                parts.append(_image(block))
            case _:
                results.append(_result(block))
    return [*results, {"role": role, "content": parts}] if parts else results


def _result(block: Fields) -> Json:
    content = block.values.get("content")
    if content is None:
        content = ""
    elif isinstance(content, list):
        inner = _blocks(block, "content", ("text", "image"))
        content = [_text_block(b) if b.values["type"] == "text" else _image(b) for b in inner]
        content = content or ""
    elif not isinstance(content, str):
        raise block.wrong("content", "a string or an array of content blocks")
    if block.boolean("is_error", False) and not content:
        content = "error"
    return {"role": "tool", "tool_call_id": _required(block, "tool_use_id"), "content": content}


def _image(block: Fields) -> Json:
    source = block.object("source")
    if source is None:
        raise block.wrong("source", "an object with type and data or url")
    kind = source.choice("type", ("base64", "url"))
    if kind is None:
        raise source.wrong("type", "one of base64, url")
    if kind == "url":
        return {"type": "image_url", "image_url": {"url": _required(source, "url")}}
    url = f"data:{_required(source, 'media_type')};base64,{_required(source, 'data')}"
    return {"type": "image_url", "image_url": {"url": url}}


def _assistant(message: Fields) -> list[Json]:
    content = message.values.get("content")
    if isinstance(content, str):
        return [{"role": "assistant", "content": content}]
    if not isinstance(content, list):
        raise message.wrong("content", "a string or an array of content blocks")
    texts, thoughts, calls = [], [], []
    allowed = ("text", "tool_use", "thinking", "redacted_thinking")
    for block in _blocks(message, "content", allowed):
        match block.values["type"]:
            case "text":
                texts.append(_required(block, "text"))
            case "thinking":
                thoughts.append(_required(block, "thinking"))
            case "tool_use":
                calls.append(_call(block))
    made: Json = {"role": "assistant", "content": "".join(texts) if texts or not calls else None}
    if thoughts:
        made["reasoning_content"] = "\n".join(thoughts)
    if calls:
        made["tool_calls"] = calls
    return [made]


def _call(block: Fields) -> Json:
    given = block.object("input")
    if given is None:
        raise block.wrong("input", "an object")
    function = {
        "name": _required(block, "name"),
        "arguments": json.dumps(given.values, ensure_ascii=False),
    }
    return {"id": _required(block, "id"), "type": "function", "function": function}


def _required(fields: Fields, key: str) -> str:
    value = fields.string(key)
    if value is None:
        raise missing(fields.name(key), "a string")
    return value


