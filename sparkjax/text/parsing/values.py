"""Argument values that come as text: which JSON value they are, by the tool's schema."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from .json_text import written

TYPES = frozenset(["string", "integer", "number", "boolean", "null", "array", "object"])
MOST_STEPS = 1000
"""Schemas that are looked at for the types of one argument."""
_PYTHON = {"True": True, "False": False, "None": None}


def property_types(parameters: Mapping[str, Any], key: str) -> frozenset[str]:
    """The types that the schema allows for one argument; an undeclared one is a string."""
    properties = resolve(parameters, parameters).get("properties")
    if not isinstance(properties, Mapping) or key not in properties:
        return frozenset(["string"])
    return types_of(properties[key], parameters)


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types that a schema allows, as far as `type`, `enum`, `const`, `$ref`, `anyOf`,
    `oneOf` and `allOf` say. All types where they say nothing, or too much to read."""
    return _Types(root).of(schema, frozenset())


class _Types:
    """One reading of a schema: references may multiply, so its steps are counted."""

    def __init__(self, root: Mapping[str, Any]):
        self._root, self._left = root, MOST_STEPS

    def of(self, schema: Any, seen: frozenset[str]) -> frozenset[str]:
        self._left -= 1
        if not isinstance(schema, Mapping) or self._left < 0:
            return TYPES
        found = TYPES
        reference = schema.get("$ref")
        if isinstance(reference, str):
            if reference in seen:
                return TYPES
            found &= self.of(lookup(self._root, reference), seen | {reference})
        if schema.get("type") is not None:
            found &= _declared(schema)
        elif "properties" in schema:
            found &= {"object"}
        elif "items" in schema:
            found &= {"array"}
        if isinstance(schema.get("enum"), list):
            found &= _all(types_in(value) for value in schema["enum"])
        if "const" in schema:
            found &= types_in(schema["const"])
        for word in ("anyOf", "oneOf"):
            if isinstance(schema.get(word), list):
                found &= _all(self.of(each, seen) for each in schema[word])
        if isinstance(schema.get("allOf"), list):
            for each in schema["allOf"]:
                found &= self.of(each, seen)
        return found or TYPES


def _declared(schema: Mapping[str, Any]) -> frozenset[str]:
    declared = schema["type"]
    names = [declared] if isinstance(declared, str) else declared
    if not isinstance(names, list):
        return TYPES
    known = frozenset(name for name in names if isinstance(name, str)) & TYPES
    if "number" in known:
        known |= {"integer"}
    if schema.get("nullable") is True:
        known |= {"null"}
    return known or TYPES


def _all(several: Iterable[frozenset[str]]) -> frozenset[str]:
    return frozenset().union(*several) or TYPES


def resolve(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema behind its `$ref`s."""
    for _ in range(32):
        if not isinstance(schema, Mapping):
            return {}
        if not isinstance(schema.get("$ref"), str):
            return schema
        schema = lookup(root, schema["$ref"])
    return {}


def lookup(root: Mapping[str, Any], reference: str) -> Any:
    """What a local reference (`#/$defs/name`) names; None for any other."""
    if not reference.startswith("#"):
        return None
    found: Any = root
    for part in reference[1:].split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, Mapping) or part not in found:
            return None
        found = found[part]
    return found


def types_in(value: Any) -> frozenset[str]:
    """The types that a JSON value has; an integral number has two."""
    if isinstance(value, bool):
        return frozenset(["boolean"])
    if value is None:
        return frozenset(["null"])
    if isinstance(value, str):
        return frozenset(["string"])
    if isinstance(value, int):
        return frozenset(["integer", "number"])
    if isinstance(value, float):
        return frozenset(["integer", "number"] if value.is_integer() else ["number"])
    return frozenset(["array" if isinstance(value, list) else "object"])


def json_value(text: str) -> Any:
    """The JSON value of a text.

    Raises:
      ValueError: it is none (NaN and numbers too large are none).
    """
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except RecursionError:
        raise ValueError("nests too deeply") from None


def typed(text: str, types: frozenset[str], python_words: bool = False) -> str:
    """JSON text of a value that was written as text.

    Args:
      types: what the schema allows.
      python_words: True, False and None count as JSON words.
    """
    if types == {"string"}:
        return written(text)
    plain = text.strip()
    try:
        if python_words and plain in _PYTHON:
            value = _PYTHON[plain]
            plain = json.dumps(value)
        else:
            value = json_value(plain)
    except ValueError:
        return written(text)
    kinds = types_in(value)
    if not kinds & types:
        return written(text)
    if isinstance(value, float) and "integer" in types and "number" not in types:
        return str(int(value))
    return plain


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large")
    return value


def _refuse(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")
