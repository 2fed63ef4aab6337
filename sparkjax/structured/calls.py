"""What is asked for where an answer has to make calls, as plain data."""

from __future__ import annotations

from typing import Any

import msgspec

MOST_CALLS = 64
"""Calls of one answer, where several may come."""


class Offered(msgspec.Struct, frozen=True):
    """One tool that may be called.

    Attributes:
      parameters: JSON Schema of an object.
      input: what the one string argument of a custom tool follows: {"syntax": "regex" or "lark",
        "definition": TEXT}; None is any text.
      custom: the tool takes plain text, which models write as the one argument `input`.
    """

    name: str
    parameters: dict[str, Any] = {}
    strict: bool = False
    input: dict[str, str] | None = None
    custom: bool = False

    @property
    def enforced(self) -> bool:
        """Its arguments are enforced in any call, not only in one that has to come."""
        return self.strict or self.input is not None


class Calls(msgspec.Struct, frozen=True):
    """Calls that an answer has to make.

    Attributes:
      format: by its name in `text.parsing.FORMATS`.
      tools: one or more; a named choice has one.
      parallel: several calls may come.
      tags: control tokens of the vocabulary, spelling to id: in a grammar they are no text.
      opened: the prompt has written what comes before the first call's name already.
      answer: a JSON Schema that the answer may follow instead of calling.
      strict: of that schema.
      free: no call needs to come, and text may stand around those that do; only tools that are
        `enforced` have their arguments enforced.
    """

    format: str
    tools: tuple[Offered, ...]
    parallel: bool = True
    tags: dict[str, int] = {}
    opened: bool = False
    answer: dict[str, Any] | None = None
    strict: bool = False
    free: bool = False
