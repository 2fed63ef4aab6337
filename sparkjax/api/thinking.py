"""How much a request wants the model to think: three ways to say it, one meaning. Pure functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from sparkjax.text.thinking import EFFORTS, Thinking

from .errors import ApiError, invalid, show, unsupported
from .fields import Fields

LARGEST = 2**31 - 1
HISTORY = (
    "preserve_thinking", "clear_thinking", "drop_thinking", "truncate_history_thinking",
    "preserve_reasoning", "keep_all_reasoning",
)  # fmt: skip
"""Switches of the reasoning in earlier turns, with each template's own meaning."""
SWITCHES = ("enable_thinking", "thinking")


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What a request wants.

    Attributes:
      on: reasoning; None leaves it to the template.
      names: what the template is told.
      budget: the most tokens of reasoning, or None.
    """

    on: bool | None = None
    names: dict[str, Any] = dataclasses.field(default_factory=dict)
    budget: int | None = None


def parse_thinking(fields: Fields, thinking: Thinking, known: Collection[str]) -> Wanted:
    """`reasoning_effort`, `chat_template_kwargs`, `enable_thinking`, `thinking` and budgets.

    Args:
      known: further names that the template reads.

    Raises:
      ApiError: 400, naming the field.
    """
    names = _kwargs(fields, known)
    switches = {
        f"chat_template_kwargs.{name}": names.pop(name) for name in SWITCHES if name in names
    }
    effort, effort_field = _effort(fields), "reasoning_effort"
    if "reasoning_effort" in names:
        inner = names.pop("reasoning_effort")
        if effort is not None and effort != inner:
            raise invalid(
                "reasoning_effort",
                f"is {show(effort)}, but chat_template_kwargs says {show(inner)}",
            )
        effort, effort_field = inner, "chat_template_kwargs.reasoning_effort"
    flag = fields.values.get("enable_thinking")
    if flag is not None:
        switches["enable_thinking"] = fields.boolean("enable_thinking", False)
    budget, given = _thinking(fields)
    if given is not None:
        switches["thinking"] = given
    on = _agreed(switches)
    if effort is not None:
        wanted = effort != "none"
        if on is not None and on != wanted:
            raise invalid(
                effort_field, f"is {show(effort)}, which contradicts {next(iter(switches))}"
            )
        if on is None or not wanted:
            on = wanted
        names |= _effort_names(effort, effort_field, thinking)
    if on is not None:
        names |= _switch_names(on, thinking, next(iter(switches), effort_field))
    return Wanted(on, names, budget)


def _effort(fields: Fields) -> str | None:
    effort = fields.values.get("reasoning_effort")
    if effort is not None and effort not in EFFORTS:
        raise ApiError(
            400, f"reasoning_effort is {show(effort)}; allowed: {', '.join(EFFORTS)}",
            param="reasoning_effort", code="unsupported_reasoning_effort",
        )  # fmt: skip
    return effort


def _thinking(fields: Fields) -> tuple[int | None, bool | None]:
    """(budget, switch) of the field `thinking` (a flag, or an object as DeepSeek, GLM and Anthropic
    have it), and of `thinking_budget`."""
    budget = fields.integer("thinking_budget", 1, LARGEST)
    value = fields.values.get("thinking")
    if value is None or isinstance(value, bool):
        return budget, value
    inner = fields.object("thinking")
    assert inner is not None
    kind = inner.choice("type", ("enabled", "disabled", "adaptive", "auto"))
    if kind is None:
        raise inner.wrong("type", "one of enabled, disabled, adaptive, auto")
    tokens = inner.integer("budget_tokens", 1, LARGEST)
    if tokens is not None and budget is not None and tokens != budget:
        raise invalid("thinking_budget", f"is {budget}, but thinking.budget_tokens is {tokens}")
    on = {"enabled": True, "disabled": False}.get(kind)
    return (tokens if tokens is not None else budget), on


def _kwargs(fields: Fields, known: Collection[str]) -> dict[str, Any]:
    given = fields.object("chat_template_kwargs")
    if given is None:
        return {}
    names: dict[str, Any] = {}
    for key, value in given.values.items():
        if value is None:
            continue
        if key in SWITCHES or key in HISTORY:
            names[key] = given.boolean(key, False)
        elif key == "reasoning_effort":
            if (
                not (isinstance(value, int) and not isinstance(value, bool))
                and value not in EFFORTS
            ):
                raise given.wrong(key, "one of " + ", ".join(EFFORTS))
            names[key] = value
        elif key in known:
            if not isinstance(value, str | int | float | bool):
                raise given.wrong(key, "a string, a number, true or false")
            names[key] = value
        else:
            allowed = ", ".join(sorted({*SWITCHES, *HISTORY, "reasoning_effort", *known}))
            raise unsupported(
                given.name(key) if len(key) < 64 else "chat_template_kwargs",
                f"is not known to the chat template; allowed: {allowed}",
            )
    return names


def _agreed(switches: dict[str, bool]) -> bool | None:
    values = list(switches.items())
    for name, value in values[1:]:
        if value != values[0][1]:
            raise invalid(name, f"is {show(value)}, but {values[0][0]} is {show(values[0][1])}")
    return values[0][1] if values else None


def _effort_names(effort: Any, field: str, thinking: Thinking) -> dict[str, Any]:
    if effort == "none":
        return {}
    if isinstance(effort, int):  # in a template's own units
        return {"reasoning_effort": effort}
    if effort in thinking.efforts:
        return {"reasoning_effort": thinking.efforts[effort]}
    if not thinking.available:
        raise ApiError(
            400, f"{field} is {show(effort)}, but the model does not reason; allowed: none",
            param=field, code="unsupported_reasoning_effort",
        )  # fmt: skip
    return {}


def _switch_names(on: bool, thinking: Thinking, field: str) -> dict[str, Any]:
    if thinking.switch is not None:
        return {thinking.switch: on}
    if not on and thinking.available:
        raise ApiError(
            400, f"{field} switches reasoning off, which the model's chat template cannot",
            param=field, code="unsupported_reasoning_effort",
        )  # fmt: skip
    return {}
