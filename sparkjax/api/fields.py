"""Typed access to the fields of a JSON object. Every error names field, value and what is allowed."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from .errors import ApiError, invalid, missing, show


class Fields:
    """The fields of one object. `null` is the same as a field that is not there.

    Args:
      values: the object.
      prefix: how its field names begin in messages, e.g. "messages[0].".
    """

    def __init__(self, values: dict[str, Any], prefix: str = ""):
        self.values, self.prefix = values, prefix

    def name(self, key: str) -> str:
        """The field's full name."""
        return self.prefix + key

    def given(self, key: str) -> bool:
        """Whether the field has a value."""
        return self.values.get(key) is not None

    def wrong(self, key: str, allowed: str) -> ApiError:
        """The error of a value that is not allowed."""
        value = self.values.get(key)
        if value is None:
            return missing(self.name(key), allowed)
        return invalid(self.name(key), f"is {show(value)}; allowed: {allowed}")

    def number(
        self, key: str, low: float, high: float, default: float, *, above: bool = False
    ) -> float:
        """A number in [low, high], or in (low, high] with `above`."""
        value = self.values.get(key)
        if value is None:
            return default
        inside = _is_number(value) and low <= value <= high and not (above and value == low)
        if not inside:
            raise self.wrong(
                key,
                f"a number above {low}, at most {high}"
                if above
                else f"a number from {low} to {high}",
            )
        return float(value)

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int | None:
        """An integer in [low, high]; 3.0 is one."""
        value = self.values.get(key)
        if value is None:
            return default
        if not (_is_number(value) and low <= value <= high and value == int(value)):
            raise self.wrong(key, f"an integer from {low} to {high}")
        return int(value)

    def boolean(self, key: str, default: bool) -> bool:
        """true or false."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def string(
        self, key: str, default: str | None = None, longest: int | None = None
    ) -> str | None:
        """A string."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.wrong(key, "a string")
        if longest is not None and len(value) > longest:
            raise self.wrong(key, f"a string of at most {longest} characters")
        return value

    def choice(self, key: str, values: Collection[str], default: str | None = None) -> str | None:
        """One of some words."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, str) or value not in values:
            raise self.wrong(key, "one of " + ", ".join(values))
        return value

    def object(self, key: str) -> Fields | None:
        """A JSON object, or None."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return Fields(value, f"{self.name(key)}.")

    def array(self, key: str, longest: int) -> list[Any] | None:
        """A JSON array of at most `longest` entries, or None."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) > longest:
            raise self.wrong(key, f"an array of at most {longest}")
        return value


def token_ids(values: list[Any], param: str, vocab_size: int) -> tuple[int, ...]:
    """Checked token ids."""
    for i, value in enumerate(values):
        if not (_is_number(value) and 0 <= value < vocab_size and value == int(value)):
            raise invalid(
                f"{param}[{i}]", f"is {show(value)}; allowed: token ids from 0 to {vocab_size - 1}"
            )
    return tuple(map(int, values))


def _is_number(value: Any) -> bool:
    # Infinity (from 1e999) passes here and fails every range check; NaN cannot be written in JSON.
    return isinstance(value, int | float) and not isinstance(value, bool)
