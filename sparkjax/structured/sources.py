"""What clients ask for, as the text of one Lark grammar.

The engine's own way to skip ahead over forced text is off in all of them: a mask then allows
exactly the tokens that the grammar allows, however they cut the text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from .matcher import GrammarError
from .patterns import lark_pattern, wrong_pattern
from .schema import SchemaError, normalise

OPTIONS = '%llguidance {"no_forcing": true}'
WHITESPACE = r"[ ]|\n[ ]{0,32}|\n\t{0,16}"
"""What may stand between two tokens of JSON, once at a place: a blank, or a line break and its
indentation. Bounded, so that an answer cannot go on in blanks for ever."""
MOST_CHOICES = 10_000
MOST_TEXT = 256 << 10
"""Bytes of a schema, a regular expression, a grammar, or all choices."""

Kind = Literal["json_object", "json_schema", "regex", "choice", "lark", "calls"]


class Wanted(msgspec.Struct, frozen=True):
    """A constraint as a client wrote it.

    Attributes:
      kind: what `value` is: nothing (any JSON object), a JSON Schema, a regular expression that
        the whole answer matches, a list of answers, a grammar in Lark's notation or in GBNF, or
        `calls.Calls` (as plain data).
      strict: of a schema: what cannot be enforced is an error, and not left out.
    """

    kind: Kind
    value: Any = None
    strict: bool = False


class Source(msgspec.Struct, frozen=True):
    """A grammar's text, and which keywords of a schema it leaves out."""

    text: str
    left_out: tuple[str, ...] = ()


def source(wanted: Wanted) -> Source:
    """The grammar of a constraint.

    Raises:
      SchemaError: the schema is none, or cannot be enforced.
      GrammarError: the same of any other kind. That the text compiles is not checked here.
    """
    size = len(msgspec.json.encode(wanted.value))
    if size > MOST_TEXT:
        raise GrammarError(f"is {size} bytes; allowed: at most {MOST_TEXT}")
    match wanted.kind:
        case "json_object":
            return Source(start(json_rule({"type": "object"})))
        case "json_schema":
            schema, left_out = normalise(wanted.value, wanted.strict)
            return Source(start(json_rule(schema, one_of=not wanted.strict)), left_out)
        case "regex":
            return Source(start(regex_rule(wanted.value)))
        case "choice":
            return Source(start("CHOICE", f"CHOICE: {choices(wanted.value)}"))
        case "lark":
            return Source(_lark(wanted.value))
        case "calls":
            from . import calls, tools

            return Source(*tools.grammar(msgspec.convert(wanted.value, calls.Calls)))


def start(rule: str, *more: str) -> str:
    """A whole grammar whose start is one rule."""
    return "\n".join([f"start: {rule}", *more, OPTIONS, ""])


def json_rule(schema: Any, one_of: bool = False) -> str:
    """The rule of a JSON value.

    Args:
      schema: as `schema.normalise` gives it.
      one_of: alternatives that may overlap are read as anyOf, and not refused.
    """
    if isinstance(schema, bool):
        if not schema:
            raise SchemaError("", "is false, which nothing satisfies")
        schema = {}
    options = {"whitespace_pattern": WHITESPACE, "coerce_one_of": one_of}
    return "%json " + json.dumps({**schema, "x-guidance": options})


def regex_rule(pattern: str) -> str:
    """The rule of a text that a regular expression matches from end to end.

    Raises:
      GrammarError: parts of it repeat too often.
    """
    if (wrong := wrong_pattern(pattern)) is not None:
        raise GrammarError(wrong)
    return f"/{lark_pattern(pattern)}/"


def choices(values: Sequence[str]) -> str:
    """The alternatives of a terminal."""
    if len(values) > MOST_CHOICES:
        raise GrammarError(f"has {len(values)} choices; allowed: at most {MOST_CHOICES}")
    return " | ".join(map(literal, dict.fromkeys(values)))


def literal(text: str) -> str:
    """A text as Lark spells it."""
    return json.dumps(text, ensure_ascii=False)


def _lark(text: str) -> str:
    if "::=" in text:
        from llguidance.gbnf_to_lark import any_to_lark

        try:
            text = any_to_lark(text)
        except Exception as error:  # of its own kinds, and whatever bad input runs it into
            raise GrammarError(f"is no GBNF: {error}") from None
    return f"{text}\n{OPTIONS}\n"
