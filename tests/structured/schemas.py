"""Random JSON Schemas: nested, enums, recursion, patterns, bounds, Unicode."""

from __future__ import annotations

import random
from typing import Any

NAMES = [
    "name",
    "id",
    "größe",
    "цена",
    "名前",
    "is ok",
    'a"b',
    "x-y",
    "emoji😀",
    "value",
    "Ünïcode",
    "tags",
]
PATTERNS = [
    "^[a-z]{2,8}$",
    "^[A-Z]{3}-[0-9]{4}$",
    "^#[0-9a-f]{6}$",
    "^(foo|bar|baz)+$",
    "^\\d{1,3}(\\.\\d{1,3}){3}$",
    "^[α-ω]{3,9}$",
]
FORMATS = ["date", "time", "date-time", "uuid", "ipv4", "email"]
VALUES: list[Any] = [
    "red",
    "grün",
    "青",
    'a "quote"',
    "line\nbreak",
    1,
    -7,
    2.5,
    True,
    None,
    "",
    [1, "x"],
    {"k": "v"},
]


def schema(seed: int) -> dict[str, Any]:
    """A schema whose answers are objects and end before long."""
    rng = random.Random(seed)
    made = _object(rng, 3)
    kind = rng.randrange(6)
    if kind == 0:  # a tree
        node = {
            "type": "object",
            "properties": {
                "value": {"type": "integer", "minimum": 0, "maximum": 99},
                "children": {"type": "array", "items": {"$ref": "#/$defs/leaf"}, "maxItems": 2},
                "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
            },
            "required": ["value"],
        }
        leaf = {"anyOf": [{"type": "null"}, {"enum": ["x", "y"]}]}
        made["properties"]["tree"] = {"$ref": "#/$defs/node"}
        made["required"] = [*made.get("required", []), "tree"]
        made["$defs"] = {"node": node, "leaf": leaf}
    elif kind == 1:
        other = _object(rng, 1)
        return {"anyOf": [made, other]}
    elif kind == 2:
        made.pop("additionalProperties", None)  # it would leave no room for the other part
        extra = {"properties": {"added": _leaf(rng)}, "required": ["added"]}
        return {
            "$defs": {"base": made},
            "allOf": [{"$ref": "#/$defs/base"}, extra],
            "additionalProperties": True,
        }
    return made


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(1, 4))
    properties = {name: _value(rng, depth - 1) for name in names}
    required = [name for name in names if rng.random() < 0.7]
    made: dict[str, Any] = {"type": "object", "properties": properties}
    if required or rng.random() < 0.5:
        made["required"] = required
    if rng.random() < 0.3:
        made["additionalProperties"] = False
    if rng.random() < 0.2:
        made["description"] = "an object that is described"
    return made


def _value(rng: random.Random, depth: int) -> Any:
    if depth <= 0 or rng.random() < 0.5:
        return _leaf(rng)
    if rng.random() < 0.5:
        return _object(rng, depth)
    least = rng.randint(0, 2)
    made: dict[str, Any] = {
        "type": "array",
        "minItems": least,
        "maxItems": least + rng.randint(0, 2),
    }
    if rng.random() < 0.3:
        made |= {
            "prefixItems": [_leaf(rng), _leaf(rng)],
            "items": False,
            "minItems": 2,
            "maxItems": 2,
        }
    else:
        made["items"] = _value(rng, depth - 1)
    return made


def _leaf(rng: random.Random) -> dict[str, Any]:
    low = rng.randint(-1000, 1000)
    return rng.choice(
        [
            {"type": "string", "maxLength": rng.randint(0, 24)},
            {"type": "string", "minLength": 3, "maxLength": rng.randint(3, 12)},
            {"type": "string", "pattern": rng.choice(PATTERNS)},
            {"type": "string", "format": rng.choice(FORMATS)},
            {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 5000)},
            {"type": "number", "exclusiveMinimum": low, "maximum": low + 10.5},
            {
                "type": "integer",
                "multipleOf": rng.choice([2, 5, 10]),
                "minimum": 0,
                "maximum": 1000,
            },
            {"type": "boolean"},
            {"type": "null"},
            {"type": ["boolean", "null"]},
            {"enum": rng.sample(VALUES, rng.randint(1, 4))},
            {"const": rng.choice(VALUES)},
            {"anyOf": [{"type": "boolean"}, {"type": "string", "maxLength": 5}]},
        ]
    )


def harder(seed: int) -> dict[str, Any]:
    """A schema whose answers may go on for long: alternatives that begin alike, large records,
    trees, anything."""
    rng = random.Random(seed)
    return rng.choice([_union, _records, _tree, _anything])(rng)


def _union(rng: random.Random) -> dict[str, Any]:
    made = [_object(rng, 2) for _ in range(rng.randint(2, 3))]
    for kind, each in zip(("cat", "category", "c"), made, strict=False):
        if rng.random() < 0.6:
            each["properties"] = {"kind": {"const": kind}, **each["properties"]}
            each["required"] = ["kind", *each.get("required", [])]
    items = {"type": "array", "items": {"anyOf": made}, "minItems": rng.randint(0, 2)}
    return {
        "type": "object",
        "properties": {"items": items, "note": {"type": "string"}},
        "required": ["items"],
    }


def _records(rng: random.Random) -> dict[str, Any]:
    text = rng.choice([{"type": "string"}, {"type": "string", "maxLength": 5}])
    values = [text, {"type": "integer"}, {"enum": ["red", "green"]}, {"type": "array", "items": text}]
    names = [f"{rng.choice(['field', 'name_of', 'x'])}_{i}" for i in range(rng.randint(5, 40))]
    record = {
        "type": "object",
        "properties": {name: rng.choice(values) for name in names},
        "required": [name for name in names if rng.random() < 0.9],
    }
    properties = {"a": text, "list": {"type": "array", "items": record}, "more": record}
    return {"type": "object", "properties": properties, "required": ["a", "list"]}


def _tree(rng: random.Random) -> dict[str, Any]:
    formats = {name: {"type": "string", "format": name} for name in rng.sample(FORMATS, 2)}
    node = {
        "type": "object",
        "properties": {
            "value": {"type": "string"},
            "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            "more": {"type": "object", "properties": formats, "required": [*formats]},
        },
        "required": ["value", "children"],
    }
    return {"$defs": {"node": node}, "$ref": "#/$defs/node"}


def _anything(rng: random.Random) -> dict[str, Any]:
    return rng.choice(
        [
            {"type": "object"},
            {"type": "object", "additionalProperties": {"type": "array", "items": {"type": "number"}}},
            {"type": "object", "properties": {"a": {}}, "required": ["a"]},
            {"type": "object", "patternProperties": {"^[a-z]+$": {"type": "string"}}, "additionalProperties": False},
        ]
    )  # fmt: skip
