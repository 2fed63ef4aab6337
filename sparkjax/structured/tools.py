"""Tool calls that have to come, as a grammar: one rule set for each format of `text.parsing`.

Names and argument names are fixed text, arguments follow their JSON Schemas, descriptions play no
part. Where a format carries strings without quotes, a string argument is any text up to its
closing tag (or one of its enum's values); other constraints on strings are not enforced there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from .matcher import GrammarError
from .schema import SchemaError, normalise
from .sources import OPTIONS, json_rule, literal

MOST_CALLS = 64
"""Calls of one answer, where several may come."""


class Offered(msgspec.Struct, frozen=True):
    """One tool that may be called."""

    name: str
    parameters: dict[str, Any] = {}
    strict: bool = False


class Calls(msgspec.Struct, frozen=True):
    """Calls that an answer has to make.

    Attributes:
      format: by its name in `text.parsing.FORMATS`.
      tools: one or more; a named choice has one.
      parallel: several calls may come.
      tags: control tokens of the vocabulary, spelling to id: in a grammar they are no text.
      opened: the prompt has written what comes before the first call's name already.
      answer: a JSON Schema that the answer may follow instead of calling.
      strict: of that schema.
      free: no call needs to come, and text may stand around those that do; only tools that are
        strict have their arguments enforced.
    """

    format: str
    tools: tuple[Offered, ...]
    parallel: bool = True
    tags: dict[str, int] = {}
    opened: bool = False
    answer: dict[str, Any] | None = None
    strict: bool = False
    free: bool = False


def grammar(calls: Calls) -> tuple[str, tuple[str, ...]]:
    """(Lark text of the grammar, the paths of schemas that were left out).

    Raises:
      SchemaError: a tool's parameters; the path begins with the tool's name and "parameters".
      GrammarError: the format has no calls that can be forced.
    """
    if calls.format not in WRITERS:
        raise GrammarError(
            f"calls in the format {calls.format} cannot be forced; allowed: {', '.join(WRITERS)}"
        )
    return _Writer(calls).whole()


class _Writer:
    """The rules of one grammar."""

    def __init__(self, calls: Calls):
        self.calls = calls
        self.rules: list[str] = []
        self.left_out: list[str] = []

    def whole(self) -> tuple[str, tuple[str, ...]]:
        write = WRITERS[self.calls.format]
        start = write(self)
        if self.calls.answer is not None:
            made = self.json(self.calls.answer, self.calls.strict, "answer")
            start = f"({start}) | {self.rule(made)}"
        elif self.calls.free:
            start = f"({start}){'*' if self.calls.parallel else '?'} {self.rule('/(?s:.*)/')}"
        text = "\n".join([f"start: {start}", *self.rules, OPTIONS, ""])
        return text, tuple(self.left_out)

    # --- Pieces -----------------------------------------------------------------------------------

    def rule(self, body: str, kind: str = "r", options: str = "") -> str:
        """Adds a rule (kind "r") or a terminal (kind "T"); its name."""
        name = f"{kind}{len(self.rules)}"
        self.rules.append(f"{name}{options}: {body}")
        return name

    def text(self, written: str) -> str:
        """Fixed text, in which control tokens are themselves."""
        parts, at = [], 0
        while at < len(written):
            found = [(i, -len(t), t) for t in self.calls.tags if (i := written.find(t, at)) >= 0]
            place, _, tag = min(found, default=(len(written), 0, ""))
            if place > at:
                parts.append(literal(written[at:place]))
            if tag:
                parts.append(f"<[{self.calls.tags[tag]}]>")
            at = place + len(tag)
        return " ".join(parts)

    def begin(self, written: str) -> str:
        """The rule of a block's opening, with any text in front where that may stand."""
        return self.until(written) if self.calls.free else self.text(written)

    def json(self, schema: Any, strict: bool, path: str) -> str:
        try:
            made, left_out = normalise(schema, strict)
            self.left_out += [f"{path}.{each}" for each in left_out]
            return json_rule(made, one_of=not strict)
        except SchemaError as error:
            raise SchemaError(f"{path}.{error.path}".rstrip("."), error.message) from None

    def arguments(self, tool: Offered) -> str:
        """The rule of a tool's arguments as a JSON object."""
        schema = tool.parameters or {"type": "object", "properties": {}}
        if self.calls.free and not tool.strict:
            schema = {"type": "object"}
        return self.rule(self.json(schema, tool.strict, self.path(tool)))

    def path(self, tool: Offered) -> str:
        return f"{tool.name}.parameters"

    def several(self, call: str, between: str = "") -> str:
        if not self.calls.parallel or self.calls.free:
            return call
        return f"{call} ({between} {call}){{0,{MOST_CALLS - 1}}}"

    def one_of(self, call: Callable[[Offered], str]) -> str:
        """The rule of one call of any of the tools."""
        return self.rule(" | ".join(self.rule(call(tool)) for tool in self.calls.tools))

    def pairs(
        self,
        tool: Offered,
        opening: Callable[[str, bool], str],
        string: Callable[[], str],
        closing: str,
    ) -> Iterator[str]:
        """The rules of arguments that are written one by one, in the order of `properties`.

        Args:
          opening: the rule of what comes before a value, by (name, whether it is a string).
          string: the rule of any string through its closing tag.
          closing: the rule of what comes behind a value.
        """
        parameters = tool.parameters
        declared = parameters.get("properties") or {}
        if not isinstance(declared, Mapping):
            raise SchemaError(f"{self.path(tool)}.properties", "is no object")
        shared = {k: parameters[k] for k in ("$defs", "definitions") if k in parameters}
        required = parameters.get("required") or []
        for name, schema in declared.items():
            path = f"{self.path(tool)}.properties.{name}"
            words = _words(schema)
            if words is not None:
                value = f"({' | '.join(map(literal, words))}) {closing}"
            elif _is_string(schema, parameters):
                value = string()
            else:
                whole = {**schema, **shared} if isinstance(schema, dict) else schema
                if self.calls.free and not tool.strict:
                    whole = True
                value = f"{self.rule(self.json(whole, tool.strict, path))} {closing}"
            is_string = words is not None or _is_string(schema, parameters)
            pair = f"{opening(name, is_string)} {value}"
            yield pair if name in required else f"({pair})?"

    def until(self, tag: str, rest: str = "") -> str:
        """The rule of any text up to the first `tag`, which a parser takes for its end, and what
        must follow then."""
        before, control, behind = self._cut(tag)
        if control is None:
            ended = self.rule("/(?s:.*)/", options=f"[suffix={literal(tag)}]")
        else:
            # What stands right in front of a control token ends the text, which has none inside.
            escaped = "".join(f"\\x{{{ord(c):x}}}" for c in before)
            ended = f"{self.rule(f'/(?s:.*){escaped}/')} <[{self.calls.tags[control]}]>"
        return f"{ended} {self.text(behind + rest)}".rstrip()

    def _cut(self, written: str) -> tuple[str, str | None, str]:
        found = [(i, -len(t), t) for t in self.calls.tags if (i := written.find(t)) >= 0]
        if not found:
            return written, None, ""
        place, _, tag = min(found)
        return written[:place], tag, written[place + len(tag) :]


def _words(schema: Any) -> list[str] | None:
    """The values of a string that has only some."""
    if not isinstance(schema, dict):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and values and all(isinstance(v, str) for v in values):
        return values
    return None


def _is_string(schema: Any, root: Mapping[str, Any]) -> bool:
    """Whether a value is written without quotes: it may be a string and nothing else."""
    for _ in range(16):
        if not isinstance(schema, dict):
            return False
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        schema = root
        for step in reference[2:].split("/"):
            schema = schema.get(step) if isinstance(schema, Mapping) else None
    return isinstance(schema, dict) and schema.get("type") in ("string", ["string"])


def _object(w: _Writer, tool: Offered, key: str) -> str:
    """{"name": N, KEY: {...}}"""
    head = json.dumps({"name": tool.name}, ensure_ascii=False)[:-1] + f', "{key}": '
    return f"{w.text(head)} {w.arguments(tool)} {literal('}')}"


def _hermes(w: _Writer) -> str:
    call = w.one_of(lambda tool: _object(w, tool, "arguments"))
    newline = w.rule("/\\n?/")
    block = w.rule(f"{w.begin('<tool_call>')} {newline} {call} {newline} {w.text('</tool_call>')}")
    return w.several(block, newline)


def _llama(w: _Writer) -> str:
    call = w.one_of(lambda tool: _object(w, tool, "parameters"))
    return w.several(call, literal("; "))


def _glm(w: _Writer) -> str:
    closing = "</arg_value>"

    def call(tool: Offered) -> str:
        pairs = w.pairs(
            tool,
            lambda name, _: w.text(f"<arg_key>{name}</arg_key><arg_value>"),
            lambda: w.until(closing),
            w.text(closing),
        )
        return " ".join([w.text(tool.name), *pairs, w.text("</tool_call>")])

    return w.several(w.rule(f"{w.begin('<tool_call>')} {w.one_of(call)}"))


def _xml(gap: str) -> Callable[[_Writer], str]:
    """Qwen's and MiMo's calls; `gap` stands between tags."""

    def write(w: _Writer) -> str:
        closing = f"{gap}</parameter>{gap}"

        def call(tool: Offered) -> str:
            pairs = w.pairs(
                tool,
                lambda name, _: w.text(f"<parameter={name}>{gap}"),
                lambda: w.until("</parameter>", gap),
                w.text(closing),
            )
            head = w.text(f"{gap}<function={tool.name}>{gap}")
            return " ".join([head, *pairs, w.text(f"</function>{gap}</tool_call>")])

        block = w.rule(f"{w.begin('<tool_call>')} {w.one_of(call)}")
        return w.several(block, literal(gap) if gap else "")

    return write


def _dsml(space: str) -> Callable[[_Writer], str]:
    """DeepSeek's calls; V4.1 writes a space behind its marker."""
    mark, end = f"<｜DSML｜{space}", f"</｜DSML｜{space}"
    block = "calls" if space else "tool_calls"

    def write(w: _Writer) -> str:
        closing = f"{end}parameter>\n"

        def opening(name: str, is_string: bool) -> str:
            return w.text(f'{mark}parameter name="{name}" string="{str(is_string).lower()}">')

        def call(tool: Offered) -> str:
            pairs = w.pairs(
                tool,
                opening,
                lambda: w.until("</｜DSML｜", f"{space}parameter>\n"),
                w.text(closing),
            )
            return " ".join(
                [w.text(f'{mark}invoke name="{tool.name}">\n'), *pairs, w.text(f"{end}invoke>\n")]
            )

        calls = w.one_of(call)
        if w.calls.parallel:
            calls = f"{calls} {calls}{{0,{MOST_CALLS - 1}}}"
        head = "" if w.calls.opened else w.begin(f"{mark}{block}>\n")
        return f"{head} {calls} {w.text(f'{end}{block}>')}".strip()

    return write


WRITERS: dict[str, Callable[[_Writer], str]] = {
    "hermes": _hermes,
    "llama": _llama,
    "glm": _glm,
    "qwen": _xml("\n"),
    "mimo": _xml(""),
    "dsml": _dsml(""),
    "dsml_spaced": _dsml(" "),
}
"""The formats whose calls can be forced."""
FREE = frozenset(WRITERS) - {"llama"}
"""Those whose calls are told from the text around them."""
