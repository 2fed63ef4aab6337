"""Typed reads of a checkpoint's config.json.

A value that the code does not implement is refused by field name, never guessed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")
_REQUIRED: Any = object()


class UnsupportedConfig(ValueError):
    """A config.json field is missing, has the wrong type, or asks for what is not implemented."""


class ConfigReader:
    """Reads fields of a (nested) config mapping; errors name the dotted field."""

    def __init__(self, values: Mapping[str, Any], where: str = "config.json", prefix: str = ""):
        self._values, self._where, self._prefix = values, where, prefix

    def has(self, key: str) -> bool:
        return self._values.get(key) is not None

    def mentions(self, key: str) -> bool:
        """Whether the key is there, be it null."""
        return key in self._values

    def refuse(self, key: str, value: Any, allowed: str) -> UnsupportedConfig:
        return UnsupportedConfig(
            f"{self._where}: {self._prefix}{key} is {value!r}; this model supports {allowed}"
        )

    def section(self, key: str) -> ConfigReader | None:
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.refuse(key, value, "an object")
        return ConfigReader(value, self._where, f"{self._prefix}{key}.")

    def read(
        self,
        key: str,
        kind: type[T],
        default: T | None = _REQUIRED,
        *,
        also: Iterable[str] = (),
        least: int | None = None,
    ) -> Any:
        """The field as `kind`; null counts as absent. Without a default it must be there. An int is
        `least` or more: 1 where it must be there, as sizes and counts are, else 0."""
        for name in (key, *also):
            value = self._values.get(name)
            if value is None:
                continue
            if kind is float and isinstance(value, int) and not isinstance(value, bool):
                value = float(value)
            if kind is int and isinstance(value, float) and value.is_integer():
                value = int(value)
            if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                raise self.refuse(name, value, f"a value of type {kind.__name__}")
            if isinstance(value, int) and kind is int:
                floor = least if least is not None else int(default is _REQUIRED)
                if value < floor:
                    raise self.refuse(name, value, f"{floor} and more")
            return value
        if default is _REQUIRED:
            raise UnsupportedConfig(f"{self._where}: {self._prefix}{key} is missing")
        return default

    def require(self, key: str, allowed: Iterable[Any], default: Any = None) -> Any:
        """The field, which must be one of `allowed` (absent counts as `default`)."""
        allowed = tuple(allowed)
        value = self._values.get(key)
        value = default if value is None else value
        if value not in allowed:
            raise self.refuse(key, value, " or ".join(repr(a) for a in allowed))
        return value

    def tokens(self, key: str) -> tuple[int, ...]:
        """A token id or a list of them."""
        value = self._values.get(key)
        if value is None:
            return ()
        found = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in found):
            raise self.refuse(key, value, "a token id or a list of them")
        return tuple(found)


def text_section(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text model's settings: multimodal releases nest them under `text_config`."""
    nested = values.get("text_config")
    return {**values, **nested} if isinstance(nested, Mapping) else values
