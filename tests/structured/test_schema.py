"""Schemas on their way to the grammar: what is dropped, closed, left out and refused."""

from __future__ import annotations

import json

import jsonschema
import pytest
import schemas
from walks import answer, follows, text

from sparkjax.structured.patterns import wrong_pattern
from sparkjax.structured.schema import FORMATS, SchemaError, normalise
from sparkjax.structured.sources import Wanted, source


def grammar(schema: object, strict: bool = False) -> str:
    return source(Wanted("json_schema", schema, strict)).text


@pytest.mark.parametrize("strict", [True, False])
def test_T31_an_object_that_lists_properties_has_no_others(strict: bool):
    listed = grammar({"type": "object", "properties": {"a": {"type": "integer"}}}, strict)
    assert follows(listed, '{"a": 1}') and follows(listed, "{}")
    assert not follows(listed, '{"b": 1}') and not follows(listed, '{"a": 1, "b": 1}')
    opened = grammar(
        {"properties": {"a": {"type": "integer"}}, "additionalProperties": True}, strict
    )
    assert follows(opened, '{"a": 1, "b": [1]}') and follows(opened, '{"b": 1}')
    bare = grammar({"type": "object"}, strict)
    assert follows(bare, '{"any": {"thing": null}}') and not follows(bare, "[]")
    required = grammar(
        {"properties": {"a": {"type": "integer"}}, "required": ["a", "other"]}, strict
    )
    assert follows(required, '{"a": 1, "other": true}')


def test_parts_of_one_object_stay_open_to_each_other():
    base = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    more = {"properties": {"b": {"type": "integer"}}, "required": ["b"]}
    for schema in (
        {"allOf": [base, more]},
        {"$defs": {"base": base}, "allOf": [{"$ref": "#/$defs/base"}, more]},
        {"$defs": {"base": base}, "$ref": "#/$defs/base", **more},
        {**base, "anyOf": [more, {"properties": {"c": {"type": "integer"}}, "required": ["c"]}]},
    ):
        assert follows(grammar(schema), '{"a": 1, "b": 2}'), schema
    either = grammar({"anyOf": [base, more]})
    assert follows(either, '{"a": 1}') and follows(either, '{"b": 1}')
    assert not follows(either, '{"a": 1, "z": 1}'), "alternatives alone are whole objects"


def test_annotations_are_dropped_everywhere():
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "x", "title": "T",
        "description": "d", "x-guidance": {"whitespace_flexible": True}, "x-other": 1,
        "type": "object",
        "properties": {"description": {"type": "string", "description": "d", "default": "q"}},
        "required": ["description"],
    }  # fmt: skip
    assert normalise(schema, True) == (
        {
            "type": "object",
            "properties": {"description": {"type": "string"}},
            "required": ["description"],
            "additionalProperties": False,
        },
        (),
    )


def test_older_drafts_and_neutral_values():
    made, left_out = normalise(
        {"items": [{"type": "integer"}], "additionalItems": False, "uniqueItems": False}, True
    )
    assert made == {"prefixItems": [{"type": "integer"}], "items": False} and not left_out


def test_what_is_not_strict_leaves_out_by_path():
    schema = {
        "properties": {
            "a": {"type": "array", "uniqueItems": True, "contains": {}},
            "b": {"format": "phone"},
        },
        "not": {},
    }
    made, left_out = normalise(schema, False)
    assert left_out == (
        "properties.a.uniqueItems",
        "properties.a.contains",
        "properties.b.format",
        "not",
    )
    assert made["properties"] == {"a": {"type": "array"}, "b": {}}


WRONG = [
    (3, ""), ({"type": "int"}, "type"), ({"type": []}, "type"), ({"enum": 3}, "enum"),
    ({"enum": []}, "enum"), ({"properties": []}, "properties"), ({"properties": {"a": 1}}, "properties.a"),
    ({"required": [1]}, "required"), ({"anyOf": []}, "anyOf"), ({"anyOf": {}}, "anyOf"),
    ({"minLength": -1}, "minLength"), ({"maxLength": 1.5}, "maxLength"), ({"maxItems": 10**6}, "maxItems"),
    ({"maxItems": True}, "maxItems"), ({"minimum": "1"}, "minimum"), ({"multipleOf": 0}, "multipleOf"),
    ({"pattern": 1}, "pattern"), ({"format": 1}, "format"), ({"$ref": "other.json"}, "$ref"),
    ({"$ref": "#/$defs/a"}, "$ref"), ({"$ref": "#a"}, "$ref"), ({"items": 5}, "items"),
    ({"$defs": {"a": {"type": "x"}}}, "$defs.a.type"), ({"minimum": 1e301}, "minimum"),
    ({"maxLength": float("inf")}, "maxLength"), ({"minItems": float("nan")}, "minItems"),
    ({"maximum": float("nan")}, "maximum"),
]  # fmt: skip


@pytest.mark.parametrize("schema, path", WRONG, ids=[json.dumps(w[0])[:40] for w in WRONG])
@pytest.mark.parametrize("strict", [True, False])
def test_what_is_no_schema_names_its_place(schema, path, strict):
    with pytest.raises(SchemaError) as error:
        normalise(schema, strict)
    assert error.value.path == path and error.value.message


def test_size_and_depth_are_bounded():
    deep: object = {}
    for _ in range(60):
        deep = {"items": deep}
    with pytest.raises(SchemaError, match="inside each other"):
        normalise(deep, False)
    with pytest.raises(SchemaError, match="more than 5000 schemas"):
        normalise({"properties": {str(i): {} for i in range(6000)}}, False)
    with pytest.raises(ValueError, match="bytes; allowed"):
        source(Wanted("json_schema", {"const": "x" * 300_000}))


def test_T30_white_space_is_bounded_and_escapes_are_valid():
    """No two blanks in a row between tokens but an indentation of at most 32; strings have only
    the escapes of JSON, and no half of a surrogate pair."""
    text = grammar(
        {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "string"}}}}
    )
    for good in (
        '{"a":["x"]}',
        '{"a": ["x", "y"]}',
        '{\n  "a": [\n    "x"\n  ]\n}',
        '{\n\t"a": []}',
        '{"a": ["\\u0001\\n\\""]}',
    ):
        assert follows(text, good), good
    for bad in (
        '{  "a": []}',
        "{\n\n}",
        '{"a": ["\\x"]}',
        '{"a": ["\\ud800"]}',
        '{"a": ["\n"]}',
        " {}",
        "{} ",
        "{" + "\n" + " " * 33 + "}",
    ):
        assert not follows(text, bad), bad


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_formats_write_something(name: str):
    value = json.loads(text(answer(grammar({"type": "string", "format": name}, True), 1)))
    assert isinstance(value, str) and value


def test_random_answers_to_generated_schemas_are_valid():
    """Judged by another implementation of JSON Schema."""
    for seed in range(40):
        schema = schemas.schema(seed)
        written = text(answer(grammar(schema, True), seed))
        jsonschema.Draft202012Validator(schema).validate(json.loads(written))


def test_counts_inside_each_other_multiply():
    for fine in (
        r"\d{1,3}(\.\d{1,3}){3}",
        "a{100000}",
        r"\{999999999}",
        "[{999999999}]",
        "(a{300}|b){300}",
        "x{",
    ):
        assert wrong_pattern(fine) is None, fine
    for wrong in ("a{100001}", "(a{400}){400}", "((a{50})+b{2}){3000}", "(" * 9 + "a" + "{9})" * 9, "a{,9999999}",
                  "a{99999999999999999999}"):  # fmt: skip
        assert "allowed: 100000" in str(wrong_pattern(wrong)), wrong
