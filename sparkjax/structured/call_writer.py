"""The pieces that grammars of calls are made of, in any format."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .calls import MOST_CALLS, Calls, Offered
from .formats import FORMATS
from .patterns import searched_pattern, whole_pattern
from .schema import LARGEST_COUNT, SchemaError, normalise
from .sources import OPTIONS, json_rule, literal, regex_rule

MOST_COUNTED = 1_000
"""Characters of text without quotes that a grammar counts: each is a state of its automaton."""
_NOT_SAID = ("allOf", "anyOf", "oneOf", "$ref", "enum", "const")
"""Keywords of such a text's schema that are not enforced: other forms of them are no strings."""
_LIMITS = ("minLength", "maxLength", "pattern", "format")
_SHARED = ("$defs", "definitions")
_NOT_PLAIN = (
    "is not supported where a string is written without quotes, as this model's calls write it; "
    "allowed: enum, const, pattern, format, minLength, maxLength"
)


class Writer:
    """The rules of one grammar.

    Attributes:
      left_out: paths of what is asked for and not enforced.
    """

    def __init__(self, calls: Calls):
        self.calls = calls
        self.rules: list[str] = []
        self.left_out: list[str] = []
        self._count = MOST_COUNTED

    def finish(self, start: str) -> tuple[str, tuple[str, ...]]:
        """(the whole grammar's text, what it leaves out)."""
        text = "\n".join([f"start: {start}", *self.rules, OPTIONS, ""])
        return text, tuple(dict.fromkeys(self.left_out))

    # --- Text -------------------------------------------------------------------------------------

    def rule(self, body: str, kind: str = "r", options: str = "") -> str:
        """Adds a rule (kind "r") or a terminal (kind "T"); its name."""
        name = f"{kind}{len(self.rules)}"
        self.rules.append(f"{name}{options}: {body}")
        return name

    def text(self, written: str) -> str:
        """Fixed text, in which control tokens are themselves."""
        parts = []
        while written:
            before, tag, behind = self._cut(written)
            if before:
                parts.append(literal(before))
            if tag:
                parts.append(f"<[{self.calls.tags[tag]}]>")
            written = behind
        return " ".join(parts)

    def anything(self) -> str:
        """The rule of any text to the answer's end."""
        return self.rule("/(?s:.*)/")

    def until(self, tag: str, rest: str = "") -> str:
        """The rule of any text up to the first `tag`, which a parser takes for its end, and what
        must follow then."""
        before, control, behind = self._cut(tag)
        if control is None:
            ended = self.rule("/(?s:.*)/", options=f"[suffix={literal(tag)}]")
        else:
            # What stands right in front of a control token ends the text, which has none inside.
            ended = f"{self.rule(f'/(?s:.*){_escaped(before)}/')} <[{self.calls.tags[control]}]>"
        return f"{ended} {self.text(behind + rest)}".rstrip()

    def begin(self, written: str) -> str:
        """The rule of a block's opening, with any text in front where that may stand."""
        return self.until(written) if self.calls.free else self.text(written)

    def _cut(self, written: str) -> tuple[str, str | None, str]:
        found = [(i, -len(t), t) for t in self.calls.tags if (i := written.find(t)) >= 0]
        if not found:
            return written, None, ""
        place, _, tag = min(found)
        return written[:place], tag, written[place + len(tag) :]

    # --- Calls ------------------------------------------------------------------------------------

    def several(self, call: str, between: str = "") -> str:
        if not self.calls.parallel or self.calls.free:
            return call
        return f"{call} ({between} {call}){{0,{MOST_CALLS - 1}}}"

    def one_of(self, call: Callable[[Offered], str]) -> str:
        """The rule of one call of any of the tools."""
        return self.rule(" | ".join(self.rule(call(tool)) for tool in self.calls.tools))

    def path(self, tool: Offered) -> str:
        return f"{tool.name}.parameters"

    # --- Arguments --------------------------------------------------------------------------------

    def json(self, schema: Any, strict: bool, path: str) -> str:
        """The rule of a JSON value. Raises SchemaError with a path that begins with `path`."""
        made = self._normal(schema, strict, path)
        try:
            return json_rule(made, one_of=not strict)
        except SchemaError as error:  # false, which nothing satisfies
            raise error.under(path) from None

    def _normal(self, schema: Any, strict: bool, path: str) -> Any:
        """A schema of a value at a path, as the engine takes it. Raises SchemaError."""
        try:
            made, left_out = normalise(schema, strict)
        except SchemaError as error:
            raise error.under(path) from None
        self.left_out += [f"{path}.{each}" for each in left_out]
        return made

    def arguments(self, tool: Offered) -> str:
        """The rule of a tool's arguments as a JSON object."""
        schema = self.quoted(tool) or {"type": "object", "properties": {}}
        if self.calls.free and not tool.enforced:
            schema = {"type": "object"}
        return self.rule(self.json(schema, tool.strict, self.path(tool)))

    def quoted(self, tool: Offered) -> dict[str, Any]:
        """The parameters of a tool in a format that writes strings as JSON. There a regular
        expression becomes the string's pattern; a Lark grammar says nothing of escapes."""
        if tool.input is None:
            return tool.parameters
        if tool.input["syntax"] != "regex":
            self.left_out.append(f"{tool.name}.format")
            return tool.parameters
        pattern = f"^(?:{whole_pattern(tool.input['definition'])})$"
        string = {"type": "string", "pattern": pattern}
        return {
            **tool.parameters,
            "properties": dict.fromkeys(tool.parameters["properties"], string),
        }

    def input(self, tool: Offered, ends: str, tag: str) -> str:
        """The rule of a custom tool's plain text through what ends it.

        Args:
          ends: what is written behind the text.
          tag: the part of `ends` that the text cannot have, since a parser ends there.
        """
        if tool.input is None:
            return self.until(tag, ends[ends.index(tag) + len(tag) :])
        definition = tool.input["definition"]
        if tool.input["syntax"] == "lark":
            inner = self.rule(f"%lark {{\n{definition}\n}}")
            return f"{inner} {self.text(ends)}"
        return self._text_like([f"(?:{whole_pattern(definition)})"], ends, tag)

    def _text_like(self, patterns: Sequence[str], ends: str, tag: str) -> str:
        """The rule of text that regular expressions match from end to end, through what ends it."""
        before, control, behind = self._cut(ends)
        text = " & ".join(map(regex_rule, patterns))
        if control is not None:
            if before:
                text = self.rule(text, "T") if len(patterns) > 1 else text
                text = f"{text} {literal(before)}"
            return f"{self.rule(text, 'T')} <[{self.calls.tags[control]}]> {self.text(behind)}".rstrip()
        # Only the tag may be the suffix: with more of it the automaton has too many expressions.
        at = ends.index(tag)
        front, rest = ends[:at], ends[at + len(tag) :]
        if front:
            text = self.rule(text, "T") if len(patterns) > 1 else text
            text = self.rule(f"{text} {literal(front)}", "T")
        body = self.rule(f"{text} & ~/(?s:.*){_escaped(tag)}(?s:.*)/", "T")
        ended = self.rule(body, options=f"[suffix={literal(tag)}]")
        return f"{ended} {self.text(rest)}".rstrip()

    def _string(self, each: _Argument, schema: dict[str, Any], strict: bool, ends: str, tag: str) -> str:
        """The rule of a string without quotes through what ends it."""
        shared = {k: each.whole[k] for k in _SHARED if k in each.whole}
        made = self._normal({**schema, **shared}, strict, each.path)
        for key in [key for key in _NOT_SAID if key in made]:
            if strict:
                raise SchemaError(f"{each.path}.{key}", _NOT_PLAIN)
            self.left_out.append(f"{each.path}.{key}")
        patterns = []
        if "pattern" in made:
            patterns.append(searched_pattern(made["pattern"]))
        if "format" in made:
            patterns.append(FORMATS[made["format"]])
        least, most = made.get("minLength", 0), made.get("maxLength")
        if most is not None and most < least:
            raise SchemaError(f"{each.path}.maxLength", f"is {most}; minLength is {least}")
        if least and not self._counts(least):
            self.left_out.append(f"{each.path}.minLength")
            least = 0
        if most is not None and not self._counts(most - least):
            self.left_out.append(f"{each.path}.maxLength")
            most = None
        if least or most is not None:
            patterns.append(f"(?s:.){{{least},{'' if most is None else most}}}")
        if patterns:
            return self._text_like(patterns, ends, tag)
        return self.until(tag, ends[ends.index(tag) + len(tag) :])

    def _fitting(
        self, words: Sequence[str], schema: Mapping[str, Any], path: str, tag: str
    ) -> list[str]:
        """Those words that the schema's other keywords allow, and in which no parser sees the end."""
        made = self._normal({k: schema[k] for k in _LIMITS if k in schema}, False, path)
        least, most = made.get("minLength", 0), made.get("maxLength", LARGEST_COUNT)
        fits = [word for word in words if least <= len(word) <= most and tag not in word]
        if "pattern" in made:
            with contextlib.suppress(re.error):  # of another dialect
                fits = [word for word in fits if re.search(made["pattern"], word)]
        if "format" in made:
            fits = [word for word in fits if re.fullmatch(FORMATS[made["format"]], word)]
        if not fits:
            raise SchemaError(path, "has no value that can be written in this model's calls")
        return fits

    def _counts(self, characters: int) -> bool:
        """Whether so many more may be counted, which they are then."""
        if characters > self._count:
            return False
        self._count -= max(characters, 0)
        return True

    def pairs(
        self, tool: Offered, opening: Callable[[str, bool], str], ends: str, tag: str
    ) -> Iterator[str]:
        """The rules of arguments that are written one by one, in the order of `properties`.

        Args:
          opening: the rule of what comes before a value, by (name, whether it is a string).
          ends: what is written behind a value.
          tag: the part of `ends` at which a parser ends a string.
        """
        closing, rest = self.text(ends), ends[ends.index(tag) + len(tag) :]
        loose = self.calls.free and not tool.enforced
        for each in self._arguments(tool, tool.parameters):
            plain = _string_schema(each.schema, tool.parameters)
            words = _words(each.schema if plain is None else plain)
            if words is not None:
                words = self._fitting(words, each.schema if plain is None else plain, each.path, tag)
                value = f"({' | '.join(map(literal, words))}) {closing}"
            elif tool.input is not None:
                value = self.input(tool, ends, tag)
            elif plain is not None and loose:
                value = self.until(tag, rest)
            elif plain is not None:
                value = self._string(each, plain, tool.strict, ends, tag)
            else:
                made = self.json(True if loose else each.whole, tool.strict, each.path)
                value = f"{self.rule(made)} {closing}"
            pair = f"{opening(each.name, words is not None or plain is not None)} {value}"
            yield pair if each.required else f"({pair})?"

    def listed(self, tool: Offered, between: str) -> str:
        """The rule of arguments as NAME=VALUE with a JSON value and `between` between two."""
        # Two rules an argument, from the last one on: what may come where one was written
        # already, and where none was.
        later = first = '""'
        for each in reversed(list(self._arguments(tool, self.quoted(tool)))):
            if not each.name.isidentifier():
                if each.required:
                    raise SchemaError(each.path, "has a name that this model's format cannot write")
                continue
            value = self.rule(self.json(each.whole, tool.strict, each.path))
            pair = f"{literal(f'{each.name}=')} {value}"
            first = self.rule(f"{pair} {later}" + ("" if each.required else f" | {first}"))
            option = "" if each.required else "?"
            later = self.rule(f"({literal(between)} {pair}){option} {later}")
        return first

    def _arguments(self, tool: Offered, parameters: Mapping[str, Any]) -> Iterator[_Argument]:
        declared = parameters.get("properties") or {}
        if not isinstance(declared, Mapping):
            raise SchemaError(f"{self.path(tool)}.properties", "is no object")
        shared = {k: parameters[k] for k in _SHARED if k in parameters}
        required = parameters.get("required") or []
        if not isinstance(required, list):
            raise SchemaError(f"{self.path(tool)}.required", "is no list of names")
        for name, schema in declared.items():
            whole = {**schema, **shared} if isinstance(schema, dict) else schema
            path = f"{self.path(tool)}.properties.{name}"
            yield _Argument(name, schema, whole, path, name in required)


@dataclasses.dataclass(frozen=True)
class _Argument:
    """One property; `whole` is its schema with the definitions that it may refer to."""

    name: str
    schema: Any
    whole: Any
    path: str
    required: bool


def _words(schema: Any) -> list[str] | None:
    """The values of a string that has only some."""
    if not isinstance(schema, dict):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and values and all(isinstance(v, str) for v in values):
        return values
    return None


def _string_schema(schema: Any, root: Mapping[str, Any]) -> dict[str, Any] | None:
    """The schema of a value that is written without quotes, since it may only be a string."""
    for _ in range(16):
        if not isinstance(schema, dict):
            return None
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        beside = {k: v for k, v in schema.items() if k != "$ref"}
        found: Any = root
        for step in reference[2:].split("/"):
            found = found.get(step) if isinstance(found, Mapping) else None
        schema = {**found, **beside} if isinstance(found, Mapping) else None
    if isinstance(schema, dict) and schema.get("type") in ("string", ["string"]):
        return schema
    return None


def _escaped(text: str) -> str:
    """A text inside of a regular expression in a grammar."""
    return "".join(f"\\x{{{ord(c):x}}}" for c in text)
