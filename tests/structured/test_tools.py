"""Forced tool calls: what a grammar lets a model write is what the format's parser reads."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest
from walks import CONTROL, TAGS, TOKENS, answer, follows, text

from sparkjax.structured import formats, tools
from sparkjax.structured.calls import Calls, Offered
from sparkjax.structured.matcher import GrammarError
from sparkjax.structured.schema import SchemaError
from sparkjax.text.events import fold
from sparkjax.text.parsing import FORMATS, Setup, Tool

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "where"},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        "where": {"$ref": "#/$defs/place"},
    },
    "required": ["city", "days"],
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"x": {"type": "number", "minimum": -99, "maximum": 99}},
            "required": ["x"],
        }
    },
}
OFFERED = (Offered("get_weather", WEATHER), Offered("stop"))
PARSERS = {"dsml_spaced": "dsml"}


def check(call) -> None:
    assert call.complete
    arguments = json.loads(call.arguments)
    if call.name == "stop":
        assert arguments == {}
        return
    assert call.name == "get_weather" and {"city", "days"} <= set(arguments) <= set(
        WEATHER["properties"]
    )
    assert isinstance(arguments["city"], str)
    assert isinstance(arguments["days"], int) and 1 <= arguments["days"] <= 14
    assert arguments.get("unit", "C") in ("C", "F")
    assert all(isinstance(f, bool) for f in arguments.get("flags", []))
    assert isinstance(arguments.get("where", {"x": 0})["x"], int | float)


def parse(name: str, tokens: list[int], control: bool, offered: tuple[Offered, ...] = OFFERED):
    setup = Setup(
        {
            each.name: Tool(
                each.parameters or {"type": "object"}, "custom" if each.custom else "function"
            )
            for each in offered
        },
        "content",
        frozenset(CONTROL) if control else frozenset(),
    )
    machine = FORMATS[PARSERS.get(name, name)].make(setup)
    events = []
    if control:  # pieces as a detokenizer gives them: control tokens alone
        pending: list[int] = []
        for token in tokens:
            if token in TAGS.values():
                if pending:
                    events += machine.feed(text(pending), False)
                    pending = []
                events += machine.feed(TOKENS[token].decode(), True)
            else:
                pending.append(token)
        if pending:
            events += machine.feed(text(pending), False)
    else:
        events += machine.feed(text(tokens))
    return fold(events + machine.finish("stop"))


@pytest.mark.parametrize("control", [True, False], ids=["control tokens", "text"])
@pytest.mark.parametrize("name", tools.WRITERS)
def test_forced_calls_are_read_as_calls(name: str, control: bool):
    calls = Calls(name, OFFERED, tags=TAGS if control else {})
    source, left_out = tools.grammar(calls)
    assert not left_out
    for seed in range(6):
        message = parse(name, answer(source, seed), control)
        assert message.tool_calls and not message.content
        for call in message.tool_calls:
            check(call)
    single = tools.grammar(Calls(name, OFFERED, parallel=False, tags=TAGS if control else {}))[0]
    for seed in range(3):
        assert len(parse(name, answer(single, seed), control).tool_calls) == 1


@pytest.mark.parametrize("control", [True, False], ids=["control tokens", "text"])
@pytest.mark.parametrize("name", sorted(tools.FREE))
def test_strict_calls_among_text_are_read_as_calls(name: str, control: bool):
    """Nothing has to come; what begins as a call goes on as one."""
    strict = (Offered("get_weather", WEATHER, True), Offered("stop", {}, True))
    source, _ = tools.grammar(Calls(name, strict, tags=TAGS if control else {}, free=True))
    called = 0
    for seed in range(12):
        message = parse(name, answer(source, seed), control)
        called += len(message.tool_calls)
        for call in message.tool_calls:
            check(call)
    assert called


def limited(most: int) -> dict:
    return {
        "type": "object",
        "properties": {
            "text": {"type": "string", "maxLength": most},
            "colour": {"$ref": "#/$defs/colour"},
        },
        "required": ["text", "colour"],
        "$defs": {"colour": {"type": "string", "enum": ["red", "grün"]}},
    }


@pytest.mark.parametrize("most", [5, 60, 500])
@pytest.mark.parametrize("control", [True, False], ids=["control tokens", "text"])
@pytest.mark.parametrize("name", tools.WRITERS)
def test_strings_are_no_longer_than_their_schemas_allow(name: str, control: bool, most: int):
    """Also where they are written without quotes, and from answer to answer."""
    schema = limited(most)
    offered = (Offered("f", schema),)
    source, left_out = tools.grammar(Calls(name, offered, False, TAGS if control else {}))
    assert not left_out
    for seed in range(4):
        (call,) = parse(name, answer(source, seed), control, offered).tool_calls
        jsonschema.validate(json.loads(call.arguments), schema)


LIMITED = [
    {"pattern": "^[a-z]{2,4}( [0-9]+)?$"},
    {"pattern": "[0-9]$", "maxLength": 12},
    {"pattern": "<[a-z]>", "minLength": 6, "maxLength": 9},
    {"minLength": 4},
    {"minLength": 2, "maxLength": 2},
    *({"format": name} for name in formats.FORMATS),
]


@pytest.mark.parametrize("limits", LIMITED, ids=str)
@pytest.mark.parametrize("name", tools.WRITERS)
def test_strings_are_as_their_schemas_say(name: str, limits: dict):
    """Also where they are written without quotes."""
    text = {"type": "string", **limits}
    schema = {"type": "object", "properties": {"s": text, "t": text}, "required": ["s"]}
    offered = (Offered("f", schema, strict=True),)
    checker = jsonschema.FormatChecker({*jsonschema.FormatChecker.checkers} - {"time"})  # older ones
    for control in (False, True):
        source, left_out = tools.grammar(Calls(name, offered, False, TAGS if control else {}))
        assert not left_out
        (call,) = parse(name, answer(source, int(control)), control, offered).tool_calls
        jsonschema.validate(json.loads(call.arguments), schema, format_checker=checker)


def test_what_is_not_enforced_of_a_string_without_quotes_is_told():
    text = {"type": "string", "minLength": 5, "maxLength": 50_000, "title": "T"}
    path = "f.parameters.properties.s"

    def left_out(text: dict, strict: bool) -> tuple[str, ...]:
        schema = {"type": "object", "properties": {"s": text}, "required": ["s"]}
        return tools.grammar(Calls("qwen", (Offered("f", schema, strict=strict),)))[1]

    assert left_out(text, True) == (f"{path}.maxLength",)
    some = {**text, "anyOf": [{"pattern": "a"}, {"pattern": "b"}]}
    assert set(left_out(some, False)) == {f"{path}.anyOf", f"{path}.maxLength"}
    for more in (some, {**text, "not": {"const": "x"}}, {**text, "format": "regex"}):
        with pytest.raises(SchemaError) as error:
            left_out(more, True)
        assert error.value.path == f"{path}.{[*more][-1]}"


@pytest.mark.parametrize("name", ["glm", "qwen", "dsml"])
def test_words_without_quotes_are_those_that_can_be_written(name: str):
    def grammar(text: dict) -> str:
        schema = {"type": "object", "properties": {"s": text}, "required": ["s"]}
        return tools.grammar(Calls(name, (Offered("f", schema, strict=True),), False, {}))[0]

    ends = {"glm": "</arg_value>", "qwen": "</parameter>", "dsml": "</｜DSML｜"}[name]
    for limits in ({"maxLength": 3}, {"pattern": "^a"}, {"format": "ipv4"}):
        words = ["abc", "127.0.0.1", "beyond"]
        left = {"maxLength": "abc", "pattern": "abc", "format": "127.0.0.1"}[next(iter(limits))]
        text = grammar({"type": "string", "enum": words, **limits})
        assert [w for w in words if f'"{w}"' in text] == [left]
    assert f'"x{ends}' not in grammar({"type": "string", "enum": ["ok", f"x{ends}"]})
    for wrong, path in (
        ({"enum": ["abc"], "maxLength": 2}, ""),
        ({"enum": [f"x{ends}"]}, ""),
        ({"minLength": 5, "maxLength": 3}, ".maxLength"),
        ({"pattern": "a)|(?:b"}, ".pattern"),
    ):
        with pytest.raises(SchemaError) as error:
            grammar({"type": "string", **wrong})
        assert error.value.path == f"f.parameters.properties.s{path}"


INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}
CUSTOM = {
    "regex": ({"syntax": "regex", "definition": '^go "(left|right)"\\\\\n?[0-9]{2}$'},
              re.compile(r'go "(left|right)"\\\n?[0-9]{2}')),
    "lark": ({"syntax": "lark", "definition": 'start: "go" (" " WORD)+ "}"\nWORD: /[a-c]+/'},
             re.compile(r"go( [a-c]+)+}")),
}  # fmt: skip


@pytest.mark.parametrize("free", [False, True], ids=["forced", "free"])
@pytest.mark.parametrize("syntax", CUSTOM)
@pytest.mark.parametrize("name", tools.WRITERS)
def test_custom_tools_follow_their_grammars(name: str, syntax: str, free: bool):
    """As plain text; where a format quotes it, a regular expression is the string's pattern and a
    Lark grammar is left out."""
    asked, pattern = CUSTOM[syntax]
    offered = (Offered("walk", INPUT, input=asked, custom=True), Offered("stop"))
    if free and name not in tools.FREE:
        return
    for control in (True, False):
        calls = Calls(name, offered, tags=TAGS if control else {}, free=free)
        source, left_out = tools.grammar(calls)
        if left_out:
            assert name in ("hermes", "llama", "pythonic") and left_out == ("walk.format",)
            continue
        found = set()
        for seed in range(8):
            for call in parse(name, answer(source, seed), control, offered).tool_calls:
                assert call.complete
                found.add(call.name)
                if call.name == "walk":
                    assert pattern.fullmatch(call.arguments), call
        assert "walk" in found or free


def test_a_custom_input_cannot_hold_what_ends_it():
    any_text = Offered("f", INPUT, input={"syntax": "regex", "definition": "(?s:.*)"}, custom=True)
    source, _ = tools.grammar(Calls("qwen", (any_text,), parallel=False))
    begin = "<tool_call>\n<function=f>\n<parameter=input>\n"
    end = "\n</parameter>\n</function>\n</tool_call>"
    assert follows(source, f"{begin}a\n</b>{end}")
    assert not follows(source, f"{begin}a</parameter>b{end}")


@pytest.mark.parametrize("control", [True, False], ids=["control tokens", "text"])
def test_T32_a_schema_and_tools_together_in_channels(control: bool):
    schema = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"]}
    calls = Calls("harmony", OFFERED, tags=TAGS if control else {}, answer=schema)
    source, _ = tools.grammar(calls)
    kinds = set()
    for seed in range(12):
        message = parse("harmony", answer(source, seed), control)
        kinds.add(bool(message.tool_calls))
        if message.tool_calls:
            check(message.tool_calls[0])
            assert not message.content
        else:
            assert json.loads(message.content)["x"] in (1, 2)
    assert kinds == {True, False}


def test_names_that_a_pythonic_call_cannot_have():
    with pytest.raises(GrammarError, match="get-weather cannot be written"):
        tools.grammar(Calls("pythonic", (Offered("get-weather"),)))
    odd = {"type": "object", "properties": {"a b": {}, "c": {"type": "null"}}}
    source, _ = tools.grammar(Calls("pythonic", (Offered("f", odd),), parallel=False))
    assert follows(source, "[f(c=null)]") and follows(source, "[f()]")
    needed = Offered("f", {**odd, "required": ["a b"]})
    with pytest.raises(SchemaError) as error:
        tools.grammar(Calls("pythonic", (needed,)))
    assert error.value.path == "f.parameters.properties.a b"


def test_required_that_is_no_list_names_its_place():
    tool = Offered("f", {"properties": {"a": {"type": "string"}}, "required": True})
    for name in ("glm", "qwen", "pythonic"):
        with pytest.raises(SchemaError, match=r"f.parameters.required: is no list"):
            tools.grammar(Calls(name, (tool,)))


def test_T32_a_schema_and_tools_together_allow_either():
    """The first token picks: the answer that the schema describes, or calls."""
    schema = {
        "type": "object",
        "properties": {"answer": {"type": "integer", "maximum": 99}},
        "required": ["answer"],
    }
    source, _ = tools.grammar(Calls("hermes", OFFERED, tags=TAGS, answer=schema))
    kinds = set()
    for seed in range(8):
        tokens = answer(source, seed)
        message = parse("hermes", tokens, True)
        if message.tool_calls:
            kinds.add("calls")
            assert not message.content
        else:
            kinds.add("answer")
            assert list(json.loads(text(tokens))) == ["answer"]
    assert kinds == {"calls", "answer"}


def test_T11_descriptions_play_no_part():
    other = {
        **WEATHER,
        "properties": {**WEATHER["properties"], "city": {"type": "string", "description": "!"}},
    }
    for name in tools.WRITERS:
        assert tools.grammar(Calls(name, (Offered("f", WEATHER),))) == tools.grammar(
            Calls(name, (Offered("f", other),))
        )


def test_what_cannot_be_forced_says_so():
    with pytest.raises(GrammarError, match="plain cannot be forced; allowed: hermes"):
        tools.grammar(Calls("plain", OFFERED))
    strict = Offered(
        "f", {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}, True
    )
    with pytest.raises(SchemaError) as error:
        tools.grammar(Calls("hermes", (OFFERED[0], strict)))
    assert error.value.path == "f.parameters.properties.a.uniqueItems"
    loose = Offered("f", strict.parameters)
    assert tools.grammar(Calls("hermes", (loose,)))[1] == ("f.parameters.properties.a.uniqueItems",)
