"""What is told of a grammar from its schemas."""

from __future__ import annotations

import json

import pytest
from test_tools import OFFERED

from sparkjax.structured import tools
from sparkjax.structured.calls import Calls
from sparkjax.structured.shapes import Shape, shape_of
from sparkjax.structured.sources import Wanted, source

TEXT = {"type": "string"}
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "name": TEXT, "note": TEXT},
    "required": ["x", "name"],
}


def shape(schema: object, kind: str = "json_schema"):
    return shape_of(source(Wanted(kind, schema)).text)


@pytest.mark.parametrize(
    ("schema", "least"),
    [
        ({"type": "array", "items": POINT}, {"x": 0, "name": ""}),
        ({"type": "array", "items": {"$ref": "#/$defs/p"}, "$defs": {"p": POINT}}, {"x": 0, "name": ""}),
        ({"anyOf": [{"type": "null"}, {"type": "array", "items": TEXT, "minItems": 3}]}, ["", "", ""]),
        ({"type": "object", "additionalProperties": {"enum": ["a long word", "a longer word"]}}, "a long word"),
        ({"type": "array", "items": {"type": "string", "pattern": "^[0-9]{30}$"}}, "0" * 30),
        ({"type": "array", "items": {"type": "string", "format": "uuid"}}, "0" * 36),
        ({"type": "array", "items": {"enum": ["no", "a long sentence " * 9]}}, "a long sentence " * 9),
    ],
)  # fmt: skip
def test_a_record_is_as_long_as_its_shortest_value(schema: object, least: object):
    written = len(json.dumps(least, separators=(",", ":")))
    assert written <= shape(schema).record <= written + 12


def test_what_has_to_come_is_no_record():
    assert shape({**POINT, "required": ["x", "name", "note"]}).record == 0


def test_what_never_ends_is_no_record():
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["next"]}
    assert shape({"type": "array", "items": node, "$defs": {"node": node}}).record == 0


def test_what_is_inside_of_itself_ends_where_it_may():
    list_ = {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/list"}}, "required": ["next"]}
    for defs in ({"list": list_, "node": node}, {"node": node, "list": list_}):
        assert 13 <= shape({"type": "array", "items": {"$ref": "#/$defs/list"}, "$defs": defs}).record < 20


@pytest.mark.parametrize(
    ("schema", "regular"),
    [
        (POINT, True),
        ({"type": "object"}, True),
        ({"anyOf": [{"type": "null"}, POINT]}, True),
        ({"type": "array", "items": {"enum": ["a", "b", 1, None]}}, True),
        ({"type": "array", "items": {"$ref": "#/$defs/p"}, "$defs": {"p": POINT}}, True),
        ({"anyOf": [POINT, {"type": "object", "properties": {"x": {"const": 1}}}]}, False),
        ({"anyOf": [TEXT, {"enum": ["a", 1]}]}, False),
        ({"anyOf": [{"type": "number"}, {"type": "integer"}]}, False),
        ({**POINT, "additionalProperties": True}, False),
        ({"type": "object", "patternProperties": {"^a": POINT}}, False),
        ({"enum": [{"a": 1}, {"a": 2, "b": 3}]}, False),
        ({"allOf": [POINT]}, False),
    ],
)
def test_content_decides_nothing_in_a_regular_grammar(schema: object, regular: bool):
    assert shape(schema).regular is regular
    assert shape(schema).json


def test_other_grammars_are_not_regular():
    assert shape("[a-z]+", "regex").record == 0
    assert not shape("[a-z]+", "regex").json
    calls, _ = tools.grammar(Calls("hermes", OFFERED, parallel=False))
    assert not shape_of(calls).json
    assert shape_of(calls).record > 0


@pytest.mark.parametrize(
    "rule", ["%json {", "%json 5", '%json {"anyOf": 5}', '%json {"enum": 1}', '"%json " "]"', "%json " + "[" * 9000]
)  # fmt: skip
def test_what_a_client_s_own_grammar_says_may_be_anything(rule: str):
    assert shape(f"start: {rule}", "lark") == Shape()


def test_a_client_s_own_grammar_may_have_schemas():
    found = shape(f'start: "a" %json {json.dumps({"type": "array", "items": POINT})}', "lark")
    assert found.record > 10
    assert not found.json


def _nested(make, depth: int = 40):
    schema: dict = {"type": "null"}
    for _ in range(depth):
        schema = make(schema)
    return {"type": "object", "properties": {"a": schema}}


@pytest.mark.parametrize(
    "schema",
    [
        _nested(lambda s: {"type": "object", "properties": {"a": s}, "required": ["a", "a"]}),
        _nested(lambda s: {"type": ["array", "array"], "items": s, "minItems": 1}),
        {"const": {"allOf": 5}, "$defs": {"b": {"$ref": "#/const"}}},
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "x\\{" + "1" * 5000}}},
        {"$defs": {"l": {"prefixItems": [{"enum": [*range(3000)]}]}},
         "anyOf": [{"$ref": f"#/$defs/l/prefixItems/{'0' * i}"} for i in range(1, 300)]},
    ],
    ids=["twice required", "twice a type", "a reference into data", "a long count", "many names"],
)  # fmt: skip
def test_a_costly_or_odd_schema_has_a_shape(schema: object):
    assert isinstance(shape(schema), Shape)
