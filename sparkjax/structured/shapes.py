"""What the JSON Schemas of a grammar say of how answers go on."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any

from .schema import SCHEMA_LISTS, SCHEMA_MAPS, normalise
from .sources import OPTIONS

log = logging.getLogger(__name__)

LARGEST = 4096
"""Bytes of a record that are heeded."""
PASSES = 8
"""References behind each other that are followed."""
ENDLESS = 1 << 20
"""Bytes of what has no end, as an object that needs another one of its kind."""
_RULE = "%json "
_DECODER = json.JSONDecoder()
_COUNT = re.compile(r"\{(\d{1,6})")
_NAME = 8
"""Bytes of a property's name that the schema does not know, with its colon and comma."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """Of one grammar.

    Attributes:
      record: bytes of JSON, about the most that have to be written once something is begun that
        nothing asked for: an item, an optional property, one of several alternatives. At most
        `LARGEST`.
      json: the answer is one JSON value.
      regular: it is, and what is inside of its strings and numbers decides nothing of what has to
        come behind them.
    """

    record: int = 0
    json: bool = False
    regular: bool = False


def shape_of(source: str) -> Shape:
    """The shape of a grammar, as `sources` and `tools` write them, or as a client does."""
    try:
        return _shape(source)
    except Exception:
        # References may lead into what is no schema. The shape saves answers from being cut; the
        # grammar does not need it.
        log.warning("a grammar's schemas cannot be measured", exc_info=True)
        return Shape()


def _shape(source: str) -> Shape:
    roots = list(_schemas(source))
    single = len(roots) == 1 and source == f"start: {_RULE}{json.dumps(roots[0])}\n{OPTIONS}\n"
    record, regular = 0, single
    for root in roots:
        sizes = _Sizes(root)
        regular = regular and all(map(sizes.regular, _nodes(root)))
        begun = [size for size in map(sizes.least, _begun(root)) if size < ENDLESS]
        record = max([record, *begun])
        if not single:  # another call
            record += sizes.least(root)
    return Shape(min(record, LARGEST), single, regular)


def _schemas(source: str) -> Iterator[Any]:
    at = source.find(_RULE)
    while at >= 0:
        end = at + len(_RULE)
        try:
            schema, end = _DECODER.raw_decode(source, end)
            normalise(schema, strict=False)
            yield schema
        except (ValueError, RecursionError):  # a client's own grammar, which may have anything
            pass
        at = source.find(_RULE, end)


def _nodes(schema: Any) -> Iterator[Any]:
    """Every schema inside of one, itself first."""
    yield schema
    if not isinstance(schema, dict):
        return
    for key, value in schema.items():
        if key in SCHEMA_MAPS:
            for each in value.values():
                yield from _nodes(each)
        elif key in SCHEMA_LISTS:
            for each in value:
                yield from _nodes(each)
        elif key in ("items", "additionalProperties"):
            yield from _nodes(value)


def _begun(root: Any) -> Iterator[Any]:
    """What an answer may begin and need not."""
    for node in _nodes(root):
        if not isinstance(node, dict):
            continue
        for key in ("anyOf", "oneOf", "prefixItems"):
            yield from node.get(key, ())
        if len(node.get("enum", ())) > 1:
            yield {"const": max(node["enum"], key=_written)}
        for name, value in node.get("properties", {}).items():
            if name not in node.get("required", ()):
                yield {"properties": {name: value}, "required": [name]}
        yield from node.get("patternProperties", {}).values()
        for key in ("items", "additionalProperties"):
            if node.get(key, False) is not False:
                yield node[key]


def _written(value: Any) -> int:
    """Bytes of a value as JSON."""
    return len(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode())


class _Sizes:
    """Bytes of values under the schemas of one root."""

    def __init__(self, root: Any):
        self._root = root
        self._sizes: dict[int, tuple[Any, int]] = {}  # by id; the schema keeps it taken
        self._known = {
            node["$ref"]: ENDLESS
            for node in _nodes(root)
            if isinstance(node, dict) and "$ref" in node
        }
        for _ in range(PASSES):  # they shrink, those first that refer to no other
            before = self._known
            self._known = {ref: self.least(self._target(ref)) for ref in before}
            self._sizes = {}
            if self._known == before:
                break

    def least(self, schema: Any) -> int:
        """Bytes of about the shortest value; `ENDLESS` where there is none that ends."""
        if not isinstance(schema, dict):
            return 1
        if id(schema) not in self._sizes:
            self._sizes[id(schema)] = schema, self._least(schema)
        return self._sizes[id(schema)][1]

    def _least(self, schema: Mapping[str, Any]) -> int:
        sizes = [self._own(schema)]
        sizes += [self.least(each) for each in schema.get("allOf", ())]
        for key in ("anyOf", "oneOf"):
            if key in schema:
                sizes.append(min(map(self.least, schema[key])))
        if "$ref" in schema:
            sizes.append(self._known[schema["$ref"]])
        return min(sum(sizes), ENDLESS)

    def _own(self, schema: Mapping[str, Any]) -> int:
        if "const" in schema or "enum" in schema:
            return min(map(_written, [schema["const"]] if "const" in schema else schema["enum"]))
        kinds = schema.get("type")
        if isinstance(kinds, list):
            return min(self._of(schema, kind) for kind in dict.fromkeys(kinds))
        return self._of(schema, kinds)

    def _of(self, schema: Mapping[str, Any], kind: str | None) -> int:
        """The same of one type, or None: whatever the keywords are about."""
        if kind == "object" or (kind is None and {"properties", "required"} & schema.keys()):
            declared, names = schema.get("properties", {}), dict.fromkeys(schema.get("required", ()))
            size = 2 + schema.get("minProperties", 0) * _NAME
            return size + sum(_written(n) + 2 + self.least(declared.get(n)) for n in names)
        if kind == "array" or (kind is None and "items" in schema):
            first = schema.get("prefixItems", [])
            more = schema.get("minItems", 0) - len(first)
            size = 2 + sum(self.least(each) + 1 for each in first[: schema.get("minItems", 0)])
            return size + max(more, 0) * (self.least(schema.get("items")) + 1)
        if kind == "string" or (kind is None and "pattern" in schema):
            pattern = schema.get("pattern", "")
            least = len(pattern) + sum(map(int, _COUNT.findall(pattern)))
            return 2 + max(least, schema.get("minLength", 0), 40 if "format" in schema else 0)
        bounds = [schema[k] for k in ("minimum", "maximum", "multipleOf") if k in schema]
        return max([1, *(len(repr(bound)) for bound in bounds)])

    def _target(self, reference: str) -> Any:
        found = self._root
        for step in reference.removeprefix("#").split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            found = found[int(step)] if isinstance(found, list) else found.get(step)
        return found

    def regular(self, schema: Any) -> bool:
        """Whether a schema, but for those inside of it, lets no text decide what follows."""
        if not isinstance(schema, dict):
            return True
        if "allOf" in schema or "patternProperties" in schema:
            return False
        if schema.get("properties") and schema.get("additionalProperties", True) is not False:
            return False
        values = schema.get("enum", ())
        if sum(isinstance(v, dict | list) for v in values) > 1:
            return False
        for key in ("anyOf", "oneOf"):
            kinds = [kind for each in schema.get(key, ()) for kind in self._kinds(each)]
            if kinds and ("properties" in schema or len({*kinds}) < len(kinds)):
                return False
        return not ("$ref" in schema and schema.keys() - {"$ref", "x-guidance", "$defs"})

    def _kinds(self, schema: Any) -> list[str]:
        """The types of values, "number" for integers too; every type where it is not said."""
        everything = ["object", "array", "string", "number", "boolean", "null"]
        if not isinstance(schema, dict):
            return everything
        for _ in range(16):
            if "$ref" not in schema:
                break
            schema = self._target(schema["$ref"])
        if not isinstance(schema, dict) or "$ref" in schema:
            return everything
        if "const" in schema or "enum" in schema:
            values = [schema["const"]] if "const" in schema else schema["enum"]
            return sorted({_KINDS[type(v)] for v in values})
        kinds = schema.get("type", everything)
        kinds = kinds if isinstance(kinds, list) else [kinds]
        return sorted({"number" if kind == "integer" else kind for kind in kinds})


_KINDS = {dict: "object", list: "array", str: "string", int: "number", float: "number",
          bool: "boolean", type(None): "null"}  # fmt: skip
