"""Structured output: from a request's fields to a grammar that was tried.

One constraint a request: `response_format` of OpenAI, `guided_*` and `structured_outputs` of vLLM,
`grammar` and `json_schema` of llama.cpp, or tool calls that have to come.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import re
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import msgspec

from sparkjax.engine.records import Grammar
from sparkjax.structured.calls import Calls, Offered
from sparkjax.structured.judge import JudgeBusy
from sparkjax.structured.matcher import GrammarError
from sparkjax.structured.schema import SchemaError
from sparkjax.structured.sources import Wanted
from sparkjax.structured.tools import FREE
from sparkjax.text.parsing.tagged import UNTHINK

from . import errors
from .errors import invalid, show, unsupported
from .fields import Fields

if TYPE_CHECKING:
    from .front import Front
    from .served import ServedModel
    from .tools import Toolbox

log = logging.getLogger(__name__)

FIELDS = (
    "response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "structured_outputs", "grammar", "json_schema",
)  # fmt: skip
FORMATS = ("text", "json_object", "json_schema", "regex", "lark")
"""Types of `response_format`; the last two are extensions."""
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


@dataclasses.dataclass(frozen=True)
class Constraint:
    """What an answer has to follow.

    Attributes:
      param: the field that asks for it, for errors.
      after: text of the answer that comes first and is free: the closing tag of the reasoning,
        where the prompt opens one.
      within: a constraint that this one has inside, judged first, in its own words.
    """

    wanted: Wanted
    param: str
    after: str = ""
    within: Constraint | None = None


def read(fields: Fields) -> Constraint | None:
    """The constraint of a request, from any of FIELDS.

    Raises:
      ApiError: a field that says nothing usable, or more than one.
    """
    given = [name for name in FIELDS if fields.given(name)]
    found = [(name, each) for name in given if (each := _READERS[name](fields, name)) is not None]
    if not found:
        return None
    if len(found) > 1:
        raise invalid(found[1][0], f"and {found[0][0]} are both given; allowed: one constraint")
    constraint = found[0][1]
    if fields.values.get("ignore_eos") is True:
        raise invalid("ignore_eos", f"is true, which does not go with {constraint.param}")
    return constraint


def behind(constraint: Constraint | None, after: str) -> Constraint | None:
    """The same constraint on what comes after a text, such as the closing tag of reasoning."""
    return None if constraint is None else dataclasses.replace(constraint, after=after)


def with_tools(
    constraint: Constraint | None, toolbox: Toolbox, served: ServedModel, start: str
) -> Constraint | None:
    """What an answer has to follow where tools are offered too.

    A call that must come leaves no room for anything else. Where a call may come, the answer is
    either a call or what `response_format` describes; other constraints have no such alternative.
    Arguments of strict tools are enforced in any case, where the format tells calls from text.

    Args:
      start: where the prompt left the model, see `text.parsing.Setup`.

    Raises:
      ApiError: 400, both cannot be enforced.
    """
    after = opening(served, start)
    if not toolbox.offers or toolbox.mode == "none":
        return behind(constraint, after)
    free = toolbox.mode == "auto" and constraint is None
    offered = tuple(
        Offered(o.name, dict(o.tool.parameters), o.strict, o.format, o.tool.kind == "custom")
        for o in toolbox.offers
    )
    if free and not (any(o.enforced for o in offered) and served.format.name in FREE):
        return None
    answer, strict = None, False
    if toolbox.mode == "auto" and constraint is not None:
        if constraint.wanted.kind not in ("json_object", "json_schema"):
            raise invalid(
                constraint.param,
                "does not go with tools; allowed: a JSON Schema, or tool_choice none",
            )
        strict = constraint.wanted.strict
        answer = constraint.wanted.value
        if not isinstance(answer, dict):
            answer = {"type": "object"} if answer is None else {}
    tags = {
        tag: token
        for tag in served.format.parser.control
        if (token := served.tokenizer.token_id(tag)) is not None
    }
    calls = Calls(
        served.format.name,
        offered,
        toolbox.parallel,
        tags,
        start == "call",
        answer,
        strict,
        free,
    )
    wanted = Wanted("calls", msgspec.to_builtins(calls))
    param = "tool_choice" if toolbox.mode == "required" else "tools"
    if served.format.splits == "channels":  # its grammars are about whole answers
        after = ""
    return Constraint(wanted, param, after, constraint if answer is not None else None)


def opening(served: ServedModel, start: str) -> str:
    """The text after which an answer proper begins, "" at once."""
    if served.format.splits == "channels":
        return "<|channel|>final<|message|>"
    return UNTHINK if start == "reasoning" else ""


async def grammar_of(front: Front, constraint: Constraint | None) -> Grammar | None:
    """The grammar of a constraint, built, tried and compiled off the event loop.

    Raises:
      ApiError: 400, it is none, or too costly; 503, too many wait.
    """
    if constraint is None:
        return None
    if constraint.within is not None:
        await grammar_of(front, constraint.within)
    try:
        made = await _result(front.judge.source(constraint.wanted))
        grammar = Grammar(made.text, constraint.after)
        await _result(front.engine.prepare(grammar))
    except SchemaError as error:
        base = "tools" if constraint.wanted.kind == "calls" else constraint.param
        param = ".".join(part for part in (base, error.path) if part)
        raise invalid(param, error.message, "unsupported_schema") from None
    except GrammarError as error:
        raise invalid(constraint.param, str(error), "invalid_grammar") from None
    except JudgeBusy as busy:
        raise errors.overloaded(f"overloaded: {busy}", 2) from None
    if made.left_out:
        log.warning("%s: not enforced: %s", constraint.param, ", ".join(made.left_out))
    return grammar


async def _result(future: Future[Any]) -> Any:
    """What another thread makes. A client that leaves does not cancel it: others may wait for the same."""
    return await asyncio.shield(asyncio.wrap_future(future))


# The fields.


def _response_format(fields: Fields, name: str) -> Constraint | None:
    given = fields.object(name)
    assert given is not None
    kind = given.string("type")
    if kind not in FORMATS:
        if kind is None:
            raise given.wrong("type", ", ".join(FORMATS))
        raise unsupported(
            given.name("type"),
            f"is {show(kind)}, which is not supported; allowed: {', '.join(FORMATS)}",
        )
    if kind == "text":
        return None
    if kind == "json_object":
        if given.given("schema"):  # llama.cpp's way
            return _schema(given, "schema", False)
        return Constraint(Wanted("json_object"), name)
    if kind == "json_schema":
        inner = given.object("json_schema")
        if inner is None:
            raise given.wrong("json_schema", "an object with name and schema")
        return _named_schema(inner)
    field = "pattern" if kind == "regex" else "grammar"
    return _text(given, field, "regex" if kind == "regex" else "lark")


def _named_schema(given: Fields) -> Constraint:
    """OpenAI's {name, description, schema, strict}."""
    label = given.string("name")
    if label is not None and not _NAME.fullmatch(label):
        raise given.wrong("name", "1 to 64 letters, digits, underscores and dashes")
    given.string("description")
    strict = given.boolean("strict", False)
    if not given.given("schema"):
        return Constraint(Wanted("json_object"), given.name("schema"))
    return _schema(given, "schema", strict)


def _schema(fields: Fields, name: str, strict: bool) -> Constraint:
    value = fields.values[name]
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise fields.wrong(name, "a JSON Schema") from None
    if not isinstance(value, dict | bool):
        raise fields.wrong(name, "a JSON Schema")
    return Constraint(Wanted("json_schema", value, strict), fields.name(name))


def _guided_json(fields: Fields, name: str) -> Constraint:
    return _schema(fields, name, False)


def _text(fields: Fields, name: str, kind: Any) -> Constraint:
    value = fields.string(name)
    if not value:
        raise fields.wrong(name, "a non-empty string")
    return Constraint(Wanted(kind, value), fields.name(name))


def _choice(fields: Fields, name: str) -> Constraint:
    value = fields.values[name]
    if not isinstance(value, list) or not value or not all(isinstance(v, str) and v for v in value):
        raise fields.wrong(name, "a non-empty array of non-empty strings")
    return Constraint(Wanted("choice", value), fields.name(name))


def _structured_outputs(fields: Fields, name: str) -> Constraint:
    given = fields.object(name)
    assert given is not None
    for key, value in given.values.items():
        if key not in _STRUCTURED and value not in (None, False):
            raise unsupported(
                given.name(key) if len(key) < 64 else name,
                f"is not supported; allowed in {name}: {', '.join(_STRUCTURED)}",
            )
    named = [key for key in _STRUCTURED if given.values.get(key) not in (None, False)]
    if len(named) != 1:
        raise fields.wrong(name, f"an object with one of {', '.join(_STRUCTURED)}")
    return _STRUCTURED[named[0]](given, named[0])


def _json_object(fields: Fields, name: str) -> Constraint:
    fields.boolean(name, False)
    return Constraint(Wanted("json_object"), fields.name(name))


def _regex(fields: Fields, name: str) -> Constraint:
    return _text(fields, name, "regex")


def _grammar(fields: Fields, name: str) -> Constraint:
    return _text(fields, name, "lark")


_Reader = Callable[[Fields, str], Constraint | None]
_STRUCTURED: dict[str, Callable[[Fields, str], Constraint]] = {
    "json": _guided_json,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "json_object": _json_object,
}
_READERS: dict[str, _Reader] = {
    "response_format": _response_format,
    "guided_json": _guided_json,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
    "structured_outputs": _structured_outputs,
    "grammar": _grammar,
    "json_schema": _guided_json,
}
