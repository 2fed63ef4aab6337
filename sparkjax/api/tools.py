"""Tools of a request: what the model may call, and what it must. Pure functions."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Literal

from sparkjax.text.parsing import Tool

from .errors import invalid, show, unsupported
from .fields import Fields

MOST_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
NAMES = "1 to 64 of A-Z, a-z, 0-9, _ and -"
Mode = Literal["none", "auto", "required"]
INPUT: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}
"""A custom tool's input, as the models know it: a function of one string."""


@dataclasses.dataclass(frozen=True)
class Offer:
    """One tool.

    Attributes:
      declared: as templates want it: {"type": "function", "function": {...}}.
      format: of a custom tool's input: None is any text, else OpenAI's object.
      strict: arguments must follow the schema.
    """

    name: str
    declared: dict[str, Any]
    tool: Tool
    strict: bool = False
    format: dict[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class Toolbox:
    """The tools of a request, those that `tool_choice` leaves.

    Attributes:
      mode: "none" offers no tool, "required" wants a call of one of them.
      parallel: several calls in one answer.
      named: `tool_choice` names the one tool.
    """

    offers: tuple[Offer, ...] = ()
    mode: Mode = "none"
    parallel: bool = True
    named: bool = False

    @property
    def tools(self) -> dict[str, Tool]:
        """What a parser of answers needs."""
        return {offer.name: offer.tool for offer in self.offers} if self.mode != "none" else {}

    @property
    def declared(self) -> list[dict[str, Any]] | None:
        """What a template prints; None for nothing."""
        offered = self.offers if self.mode != "none" else ()
        return [offer.declared for offer in offered] or None

    @property
    def forced(self) -> bool:
        """Whether a grammar has to hold: a call that must come, or arguments that must fit."""
        return self.mode == "required"


def parse_tools(fields: Fields) -> Toolbox:
    """The fields `tools`, `tool_choice` and `parallel_tool_calls`.

    Raises:
      ApiError: 400, naming the field.
    """
    given = fields.array("tools", MOST_TOOLS) or []
    offers = tuple(_offer(tool, f"tools[{i}]") for i, tool in enumerate(given))
    seen: set[str] = set()
    for i, offer in enumerate(offers):
        if offer.name in seen:
            raise invalid(f"tools[{i}]", f"is the second tool named {show(offer.name)}")
        seen.add(offer.name)
    mode, names = _choice(fields, offers)
    parallel = fields.boolean("parallel_tool_calls", True)
    if names is not None:
        offers = tuple(offer for offer in offers if offer.name in names)
    value = fields.values.get("tool_choice")
    named = isinstance(value, dict) and value.get("type") != "allowed_tools"
    return Toolbox(offers, mode if offers else "none", parallel, named)


def _offer(value: Any, where: str) -> Offer:
    if not isinstance(value, dict):
        raise invalid(where, f"is {show(value)}; allowed: an object with type and function")
    fields = Fields(value, f"{where}.")
    kind = fields.string("type", "function")
    if kind not in ("function", "custom"):
        raise unsupported(
            fields.name("type"),
            f'is {show(kind)}, which is not supported; allowed: "function", "custom"',
        )
    # Responses' flat form is read too: clients mix them up.
    inner = fields.object(kind) or fields
    name = inner.string("name")
    if name is None or not _NAME.fullmatch(name):
        raise inner.wrong("name", NAMES)
    description = inner.string("description")
    if kind == "custom":
        return _custom(inner, name, description)
    parameters = inner.object("parameters")
    strict = inner.boolean("strict", False)
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    schema: dict[str, Any] = parameters.values if parameters is not None else {}
    if parameters is not None and schema.get("type", "object") != "object":
        raise inner.wrong("parameters", 'a JSON Schema of "type": "object"')
    function["parameters"] = schema or {"type": "object", "properties": {}}
    if strict:
        function["strict"] = True
    declared = {"type": "function", "function": function}
    return Offer(name, declared, Tool(schema), strict)


def _custom(fields: Fields, name: str, description: str | None) -> Offer:
    form = fields.object("format")
    words = description or ""
    wanted: dict[str, Any] | None = None
    if form is not None:
        kind = form.choice("type", ("text", "grammar"), "text")
        if kind == "grammar":
            grammar = form.object("grammar") or form
            syntax = grammar.choice("syntax", ("lark", "regex"))
            definition = grammar.string("definition")
            if syntax is None:
                raise grammar.wrong("syntax", "one of lark, regex")
            if definition is None:
                raise grammar.wrong("definition", "a string")
            wanted = {"syntax": syntax, "definition": definition}
            words += f"\n\nThe input follows this {syntax} grammar:\n{definition}"
    function = {"name": name, "description": words.strip(), "parameters": INPUT}
    return Offer(
        name, {"type": "function", "function": function}, Tool(INPUT, "custom"), format=wanted
    )


def _choice(fields: Fields, offers: tuple[Offer, ...]) -> tuple[Mode, set[str] | None]:
    """(mode, the names that are left; None is all)."""
    value = fields.values.get("tool_choice")
    allowed = "none, auto, required, or an object that names a function or allowed_tools"
    if value is None:
        return ("auto" if offers else "none"), None
    if isinstance(value, str):
        if value not in ("none", "auto", "required"):
            raise fields.wrong("tool_choice", allowed)
        if value == "required" and not offers:
            raise invalid("tool_choice", 'is "required", which needs tools')
        return ("none" if value == "none" or not offers else value), None  # type: ignore[return-value]
    chosen = fields.object("tool_choice")
    kind = chosen.string("type") if chosen is not None else None
    if chosen is None or kind not in ("function", "custom", "allowed_tools"):
        raise fields.wrong("tool_choice", allowed)
    if not offers:
        raise invalid("tool_choice", f"is {show(value)}, which needs tools")
    if kind != "allowed_tools":
        return "required", {_named(chosen.object(kind) or chosen, offers)}
    inner = chosen.object("allowed_tools") or chosen
    mode = inner.choice("mode", ("auto", "required"), "auto")
    tools = inner.array("tools", MOST_TOOLS)
    if not tools:
        raise inner.wrong("tools", "a non-empty array of tools that are offered")
    names = set()
    for i, tool in enumerate(tools):
        where = f"{inner.name('tools')}[{i}]"
        if not isinstance(tool, dict):
            raise invalid(where, f"is {show(tool)}; allowed: an object that names a tool")
        entry = Fields(tool, f"{where}.")
        names.add(_named(entry.object(str(tool.get("type"))) or entry, offers))
    return mode, names  # type: ignore[return-value]


def _named(fields: Fields, offers: tuple[Offer, ...]) -> str:
    name = fields.string("name")
    names = [offer.name for offer in offers]
    if name not in names:
        raise fields.wrong("name", "one of " + ", ".join(names[:20]))
    return str(name)
