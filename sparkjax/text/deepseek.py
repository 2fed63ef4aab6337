"""DeepSeek-V4's and V4.1's own prompts: they come without a Jinja template.

After DeepSeek's published encoder (deepseek-recipe 0.2.0, MIT), whose outputs the tests hold this
to. The fixed texts are what the models were trained on. `DeepSeekEncoder` stands where a
`ChatTemplate` stands.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from sparkjax.text.template import TemplateError

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
SYSTEM, USER, ASSISTANT = "<｜System｜>", "<｜User｜>", "<｜Assistant｜>"
REMINDER = "<｜latest_reminder｜>"
THINK, UNTHINK = "<think>", "</think>"

_HIGH = """Reasoning Effort: Absolute maximum with no shortcuts permitted.
You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.
Explicitly write out your entire deliberation process, documenting every intermediate step, considered alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.

"""
_MAX = """Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.
You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose the problem into its most fundamental components, trace every causal chain to its root, and resolve the underlying cause rather than any surface symptom.
Do not stop reasoning until you have independently verified the solution from multiple angles and are certain that no assumption remains unchecked and no error remains undiscovered.

"""
_TOOLS = """## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "<{m}{block}>" block like the following:

<{m}{block}>
<{m}invoke name="$TOOL_NAME">
<{m}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{m}parameter>
...
</{m}invoke>
<{m}invoke name="$TOOL_NAME2">
...
</{m}invoke>
</{m}{block}>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

{tools}

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""
_SCHEMA = "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
_JSON_V4 = (
    "You are a helpful assistant designed to output JSON.\n## Response Format:\n\n"
    "Reply with JSON object ONLY."
)


@dataclasses.dataclass(frozen=True)
class Dialect:
    """What differs between the versions.

    Attributes:
      mark: in front of the words of call tags; `block` is the outermost word.
      efforts: what is written for each effort.
      empty: what stands between the tags of a call without arguments.
      systems_stay: system messages stay where they are, in turns of their own.
      json_object: the response format of any JSON object.
    """

    mark: str
    block: str
    efforts: Mapping[str, str]
    empty: str
    systems_stay: bool
    json_object: str


def _line(effort: Any) -> str:
    return (
        f"Reasoning Effort: {effort} "
        "(range 1-100, the higher the value, the more thorough the reasoning)\n\n"
    )


V4 = Dialect("｜DSML｜", "tool_calls", {"low": "", "high": _HIGH, "max": _MAX}, "", False, _JSON_V4)
V41 = Dialect(
    "｜DSML｜ ",
    "calls",
    {"low": _line(50), "high": _line(75), "max": _line(100)},
    "\n",
    True,
    _SCHEMA + '{"type": "json_object"}',
)
_EFFORTS = {"minimal": "low", "medium": "high", "xhigh": "high"}


class DeepSeekEncoder:
    """Prompts of one version.

    Attributes:
      efforts: what each of OpenAI's efforts is called.
      others: see ChatTemplate.
    """

    source = "reasoning_effort enable_thinking <think></think> ｜DSML｜"
    names: frozenset[str] = frozenset()
    reads = ("tool_choice", "response_format")
    efforts: ClassVar[dict[str, str]] = {**_EFFORTS, "low": "low", "high": "high", "max": "max"}
    joiner = "\n\n"
    keeps_tags = False
    continues = True
    any_arguments = True

    def __init__(self, dialect: Dialect):
        self._dialect = dialect

    @classmethod
    def of(cls, model_type: str) -> DeepSeekEncoder | None:
        """The encoder of a family, None for one that has a template."""
        found = {"deepseek_v4": V4, "deepseek_v41": V41}.get(model_type)
        return cls(found) if found is not None else None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        enable_thinking: bool = True,
        reasoning_effort: Any = None,
        drop_thinking: bool = True,
        tool_choice: str | None = None,
        response_format: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> str:
        """The prompt of a conversation.

        Args:
          messages: with string contents; `reasoning_content`, `tool_calls` with arguments as
            objects or text, and `prefix` for an answer that goes on.
          reasoning_effort: a word, or V4.1's number from 1 to 100.
          drop_thinking: earlier reasoning is left out where no tools are offered.
          tool_choice: "required" opens the block of calls.
          response_format: OpenAI's.

        Raises:
          TemplateError: what the format cannot express.
        """
        if not messages:
            raise TemplateError("there are no messages")
        if reasoning_effort == "none":
            enable_thinking = False
        if tool_choice == "required" and enable_thinking:
            raise TemplateError("a call cannot be required while the model reasons")
        words = _Words(self._dialect, enable_thinking, bool(tools) or not drop_thinking)
        turns = _turns(messages, self._dialect.systems_stay)
        head = self._head(turns, tools, enable_thinking, reasoning_effort, response_format)
        parts = [BOS, head]
        for turn in turns:
            parts.append(words.turn(turn))
        if add_generation_prompt and not (turns and turns[-1].get("prefix")):
            parts.append(ASSISTANT + (THINK if enable_thinking else UNTHINK))
            if tool_choice == "required":
                parts.append(f"\n\n<{self._dialect.mark}{self._dialect.block}>\n")
        return "".join(parts)

    def start(self, prompt: str) -> Literal["content", "reasoning", "call"]:
        """Where a rendered prompt leaves the model: by the last tag of the last answer's head."""
        if prompt.endswith(f"<{self._dialect.mark}{self._dialect.block}>\n"):
            return "call"
        tail = prompt[prompt.rfind(ASSISTANT) :]
        return "reasoning" if tail.rfind(THINK) > tail.rfind(UNTHINK) else "content"

    def _head(
        self, turns: list[dict[str, Any]], tools: Any, thinking: bool, effort: Any, form: Any
    ) -> str:
        """Effort, the first system message, tools and response format; removes the message."""
        dialect = self._dialect
        line = self._effort(effort) if thinking else ""
        system = turns.pop(0)["content"] if turns and turns[0]["role"] == "system" else None
        blocks = [system or ""]
        if tools:
            inner = (json.dumps(_tool(tool), ensure_ascii=False) for tool in tools)
            filled = _TOOLS.replace("{m}", dialect.mark).replace("{block}", dialect.block)
            blocks.append(filled.replace("{tools}", "\n".join(inner)))
        kind = (form or {}).get("type")
        if kind == "json_object":
            blocks.append(dialect.json_object)
        elif kind == "json_schema":
            schema = (form or {}).get("json_schema", {}).get("schema", {})
            blocks.append(_SCHEMA + json.dumps(schema, ensure_ascii=False))
        text = line + "\n\n".join(blocks)
        return SYSTEM + text if dialect.systems_stay and text else text

    def _effort(self, effort: Any) -> str:
        if effort is None:
            effort = "high"
        if isinstance(effort, int) and not isinstance(effort, bool):
            if not self._dialect.systems_stay or not 1 <= effort <= 100:
                raise TemplateError(
                    f"reasoning_effort is {effort}; allowed: low, high, max, or 1 to 100"
                )
            return _line(effort)
        found = self._dialect.efforts.get(_EFFORTS.get(effort, effort))
        if found is None:
            raise TemplateError(f"reasoning_effort is {effort!r}; allowed: low, high, max")
        return found


class _Words:
    """Writes turns."""

    def __init__(self, dialect: Dialect, thinking: bool, keep: bool):
        self.dialect, self.thinking, self.keep = dialect, thinking, keep

    def turn(self, turn: dict[str, Any]) -> str:
        role = turn["role"]
        if role == "system":
            return SYSTEM + turn["content"]
        if role == "latest_reminder":
            return REMINDER + turn["content"]
        if role == "user":
            return USER + "\n\n".join(turn["blocks"])
        return self._answer(turn)

    def _answer(self, turn: dict[str, Any]) -> str:
        prefix = bool(turn.get("prefix"))
        content, reasoning = turn["content"], turn.get("reasoning_content") or ""
        if not self.thinking or not (self.keep or prefix):
            text = ASSISTANT + UNTHINK
        elif prefix and not content:
            return ASSISTANT + THINK + reasoning  # goes on reasoning
        else:
            text = ASSISTANT + THINK + reasoning + UNTHINK
        text += content
        if turn.get("tool_calls"):
            text += self._calls(turn["tool_calls"])
        return text if prefix else text + EOS

    def _calls(self, calls: Sequence[Mapping[str, Any]]) -> str:
        mark, block = self.dialect.mark, self.dialect.block
        made = [f"\n\n<{mark}{block}>\n"]
        for call in calls:
            function = call["function"]
            arguments = function.get("arguments")
            if not isinstance(arguments, Mapping):
                arguments = _parsed(arguments)
            lines = [self._argument(key, value) for key, value in arguments.items()]
            body = "".join(lines) or self.dialect.empty
            made.append(f'<{mark}invoke name="{function["name"]}">\n{body}</{mark}invoke>\n')
        made.append(f"</{mark}{block}>")
        return "".join(made)

    def _argument(self, key: str, value: Any) -> str:
        mark = self.dialect.mark
        string = isinstance(value, str)
        text = value if string else json.dumps(value, ensure_ascii=False)
        return f'<{mark}parameter name="{key}" string="{str(string).lower()}">{text}</{mark}parameter>\n'


def _parsed(arguments: Any) -> Mapping[str, Any]:
    """Arguments from text; a text that is no object becomes one argument of that name."""
    if not arguments:
        return {}
    try:
        value = json.loads(arguments)
    except (ValueError, TypeError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool's line: its name, description and parameters, in this order."""
    given = tool.get("function", tool)
    function = {
        "name": given.get("name"),
        "description": given.get("description") or "",
        "parameters": given.get("parameters") or {},
    }
    if given.get("strict"):
        parameters = dict(function["parameters"])
        properties = parameters.get("properties") or {}
        required = parameters.get("required") or list(properties)
        named = isinstance(required, list) and all(isinstance(name, str) for name in required)
        if not named or not isinstance(properties, Mapping) or sorted(required) != sorted(properties):
            raise TemplateError(
                f"tool {function['name']!r} is strict, but `required` does not name all properties"
            )
        parameters.pop("required", None)
        parameters |= {"additionalProperties": False, "required": list(properties)}
        function["parameters"] = parameters
    return function


def _turns(messages: Sequence[Mapping[str, Any]], systems_stay: bool) -> list[dict[str, Any]]:
    """Messages as turns: user and tool messages in a row are one turn of blocks.

    Raises:
      TemplateError: results without calls, calls without results.
    """
    given = [dict(m) for m in messages if m["role"] != "system" or m["content"]]
    if not systems_stay:
        systems = [m["content"] for m in given if m["role"] == "system"]
        rest = [m for m in given if m["role"] != "system"]
        first = [{"role": "system", "content": "\n\n".join(systems)}] if systems else []
        given = [*first, *rest]
    turns: list[dict[str, Any]] = []
    open_calls: list[str] = []
    results: dict[str, str] = {}
    places: list[int] = []

    def close() -> None:
        """Puts the results of a turn into the order of the calls."""
        nonlocal open_calls, results, places
        if any(call not in results for call in open_calls):
            raise TemplateError("a call in the messages has no result")
        ordered = [results[call] for call in open_calls]
        for place, text in zip(places, ordered, strict=True):
            turns[-1]["blocks"][place] = f"<tool_result>{text}</tool_result>"
        open_calls, results, places = [], {}, []

    for message in given:
        role = message["role"]
        if role not in ("tool", "user"):
            if open_calls:
                close()
            turns.append(message)
            if role == "assistant":
                open_calls = [str(c.get("id")) for c in message.get("tool_calls") or []]
                if len(set(open_calls)) < len(open_calls):
                    raise TemplateError("two calls of one message have the same id, or none")
            continue
        if not turns or turns[-1]["role"] != "user":
            turns.append({"role": "user", "blocks": []})
        if role == "user":
            if open_calls and len(results) < len(open_calls):
                raise TemplateError("a call in the messages has no result")
            turns[-1]["blocks"].append(message["content"])
            continue
        call = str(message.get("tool_call_id"))
        if call not in open_calls or call in results:
            raise TemplateError(
                f"a result answers call {call!r}, which no message in front of it makes"
            )
        results[call] = message["content"]
        places.append(len(turns[-1]["blocks"]))
        turns[-1]["blocks"].append("")
    if open_calls:
        close()
    return turns
