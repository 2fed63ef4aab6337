"""JSON Schemas as clients write them, to schemas that the grammar engine takes as they are.

Annotations are dropped: they never reach the grammar. What the engine cannot enforce is refused by
its path in strict mode, and left out otherwise (the answer may then break that one rule). The
keywords are those of draft 2020-12, with `definitions` and item lists of the older drafts.

**An object that lists `properties` and says nothing of others has no others**, strict or not. JSON
Schema would allow any; an answer without them is valid under both readings, and it ends. Objects
that are put together from several schemas (`allOf`, `$ref` beside other keywords, alternatives
beside `properties`) keep JSON Schema's reading, since no part knows the names of the others.
"""

from __future__ import annotations

from typing import Any

from .formats import FORMATS
from .patterns import wrong_pattern

MOST_NODES = 5_000
"""Schemas inside of one schema."""
DEEPEST = 48
"""Schemas inside each other."""
LARGEST_COUNT = 100_000
"""The largest minLength, maxItems and the like: larger ones cost the automaton too much."""

TYPES = ("null", "boolean", "object", "array", "number", "string", "integer")
ANNOTATIONS = frozenset(
    ["title", "description", "default", "examples", "example", "deprecated", "readOnly",
     "writeOnly", "$schema", "$id", "$comment", "$anchor", "contentMediaType", "contentEncoding"]
)  # fmt: skip
SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions")
SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
NEUTRAL: dict[str, Any] = {"uniqueItems": False, "nullable": False, "unevaluatedItems": True,
                               "unevaluatedProperties": True, "dependentRequired": {},
                               "dependentSchemas": {}, "propertyNames": True}  # fmt: skip
"""Keywords that are not implemented, with the value that asks for nothing."""


class SchemaError(ValueError):
    """A schema that cannot be used.

    Attributes:
      path: keywords from the schema's root to what is wrong with it, dotted; "" is the root.
    """

    def __init__(self, path: str, message: str):
        super().__init__(f"{path or 'the schema'}: {message}")
        self.path, self.message = path, message

    def under(self, path: str) -> SchemaError:
        """The same of a schema that is found at a path of something larger."""
        return SchemaError(f"{path}.{self.path}".rstrip("."), self.message)


def normalise(schema: Any, strict: bool) -> tuple[Any, tuple[str, ...]]:
    """(the schema for the engine, the paths that were left out).

    Raises:
      SchemaError: it is no schema, too large, or (strict) uses what is not implemented.
    """
    opened: set[str] = set()
    while True:
        walk = _Walk(schema, strict, opened)
        made = walk.node(schema, (), False, 0)
        if walk.opened == opened:
            return made, tuple(walk.left_out)
        opened = walk.opened


class _Walk:
    """One pass. `opened` are pointers of schemas that are parts of others: each pass may find more
    of them, and they may have been walked before."""

    def __init__(self, root: Any, strict: bool, opened: set[str]):
        self.root, self.strict = root, strict
        self.opened = set(opened)
        self.left_out: list[str] = []
        self.nodes = 0

    def node(self, schema: Any, path: tuple[str, ...], part: bool, depth: int) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise _error(path, f"is {_kind(schema)}; a schema is an object, true or false")
        self.nodes += 1
        if self.nodes > MOST_NODES:
            raise _error(path, f"more than {MOST_NODES} schemas inside of one")
        if depth > DEEPEST:
            raise _error(path, f"more than {DEEPEST} schemas inside each other")
        part = part or pointer(path) in self.opened
        joined = part or _joins(schema)
        made: dict[str, Any] = {}
        for key, value in schema.items():
            self._keyword(made, key, value, (*path, key), joined, depth)
        if not joined and "properties" in made and "additionalProperties" not in made:
            if "patternProperties" not in made:
                made["additionalProperties"] = False
            for name in made.get("required", ()):
                made["properties"].setdefault(name, True)
        return made

    def _keyword(
        self,
        made: dict[str, Any],
        key: str,
        value: Any,
        path: tuple[str, ...],
        joined: bool,
        depth: int,
    ) -> None:
        if key in ANNOTATIONS or key.startswith("x-"):
            return
        if key in SCHEMA_MAPS:
            if not isinstance(value, dict):
                raise _error(path, f"is {_kind(value)}; allowed: an object of schemas")
            made[key] = {k: self.node(v, (*path, k), False, depth + 1) for k, v in value.items()}
            if key == "patternProperties":
                for each in value:
                    _pattern(each, path)
        elif key in SCHEMA_LISTS or (key == "items" and isinstance(value, list)):
            key = "prefixItems" if key == "items" else key  # drafts before 2020
            if not isinstance(value, list) or not (value or key == "prefixItems"):
                raise _error(path, f"is {_kind(value)}; allowed: a list of schemas")
            # A schema of allOf is always a part; an alternative is one beside other keywords.
            part = key == "allOf" or (key in ("anyOf", "oneOf") and joined)
            made[key] = [
                self.node(v, (*path, str(i)), part, depth + 1) for i, v in enumerate(value)
            ]
        elif key == "additionalItems" and isinstance(value, bool | dict):
            made["items"] = self.node(value, path, False, depth + 1)
        elif key in ("items", "additionalProperties"):
            made[key] = self.node(value, path, False, depth + 1)
        elif key == "$ref":
            made[key] = self._reference(value, path, joined)
        else:
            self._plain(made, key, value, path)

    def _plain(self, made: dict[str, Any], key: str, value: Any, path: tuple[str, ...]) -> None:
        """Keywords whose values are not schemas."""
        if key == "type":
            kinds = value if isinstance(value, list) else [value]
            if not kinds or not all(isinstance(k, str) and k in TYPES for k in kinds):
                raise _error(path, f"is {_shown(value)}; allowed: " + ", ".join(TYPES))
        elif key == "required":
            if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
                raise _error(path, f"is {_kind(value)}; allowed: a list of names")
        elif key == "enum":
            if not isinstance(value, list) or not value:
                raise _error(path, f"is {_kind(value)}; allowed: a list of one value or more")
        elif key in COUNTS:
            # In this order: infinity and NaN have no integer.
            if not (_is_number(value) and 0 <= value <= LARGEST_COUNT and value == int(value)):
                raise _error(path, f"is {_shown(value)}; allowed: 0 to {LARGEST_COUNT}")
            value = int(value)
        elif key in NUMBERS:
            if not (_is_number(value) and abs(value) <= 1e300):
                raise _error(path, f"is {_shown(value)}; allowed: a number")
            if key == "multipleOf" and value <= 0:
                raise _error(path, f"is {_shown(value)}; allowed: a number above 0")
        elif key == "pattern":
            _pattern(value, path)
        elif key == "format":
            if not isinstance(value, str):
                raise _error(path, f"is {_kind(value)}; allowed: a string")
            if value not in FORMATS:
                return self._leave_out(
                    path, f"{value} is not supported; allowed: {', '.join(sorted(FORMATS))}"
                )
        elif key != "const":
            if key not in NEUTRAL or value != NEUTRAL[key]:
                self._leave_out(path, "is not supported")
            return None
        made[key] = value
        return None

    def _reference(self, value: Any, path: tuple[str, ...], joined: bool) -> str:
        if not isinstance(value, str) or not value.startswith("#"):
            raise _error(
                path, f"is {_shown(value)}; allowed: a place in this schema, as #/$defs/name"
            )
        target: Any = self.root
        for step in value.removeprefix("#").split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(target, dict) and step in target:
                target = target[step]
            elif isinstance(target, list) and step.isdecimal() and int(step) < len(target):
                target = target[int(step)]
            else:
                raise _error(path, f"is {_shown(value)}, which is not in the schema")
        if value not in ("#", "#/") and not value.startswith("#/"):
            raise _error(
                path, f"is {_shown(value)}; allowed: a place in this schema, as #/$defs/name"
            )
        if joined:
            self.opened.add(value)
        return value

    def _leave_out(self, path: tuple[str, ...], why: str) -> None:
        if self.strict:
            raise _error(path, why)
        self.left_out.append(".".join(path))


def _joins(schema: dict[str, Any]) -> bool:
    """Whether a schema puts objects together from several places."""
    if "allOf" in schema:
        return True
    shapes = {"properties", "required", "additionalProperties", "patternProperties"} & schema.keys()
    if "$ref" in schema:
        return bool(shapes or {"anyOf", "oneOf"} & schema.keys())
    return bool(shapes) and bool({"anyOf", "oneOf"} & schema.keys())


def pointer(path: tuple[str, ...]) -> str:
    """The JSON pointer of a path, as `$ref` spells it."""
    return "#" + "".join("/" + step.replace("~", "~0").replace("/", "~1") for step in path)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _pattern(value: Any, path: tuple[str, ...]) -> None:
    if not isinstance(value, str):
        raise _error(path, f"is {_kind(value)}; allowed: a regular expression")
    if (wrong := wrong_pattern(value)) is not None:
        raise _error(path, wrong)


def _error(path: tuple[str, ...], message: str) -> SchemaError:
    return SchemaError(".".join(path), message)


def _kind(value: Any) -> str:
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string",
             list: f"a list of {len(value) if isinstance(value, list) else 0}", dict: "an object"}  # fmt: skip
    return "null" if value is None else names.get(type(value), type(value).__name__)


def _shown(value: Any) -> str:
    text = repr(value) if isinstance(value, str | int | float) else _kind(value)
    return text if len(text) <= 80 else text[:80] + "..."
