"""The sandbox that chat templates run in.

A template comes with a checkpoint, and what it renders comes from users: neither may reach Python's
internals, run for long, or make a huge string. jinja2's immutable sandbox does the first; this adds
a deadline, checked at every call, lookup and output, and a bound on what can make much out of
little: repetition, widths, replacement, concatenation.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Limits(NamedTuple):
    """characters: of the output and of any string on the way; seconds: of one rendering."""

    characters: int = 16_000_000
    seconds: float = 5.0


class LimitError(Exception):
    """A rendering that became too large or took too long."""


class _Run:
    """One rendering: when it must end, and how much it has printed."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self.deadline = time.monotonic() + limits.seconds
        self.printed = 0


_run: ContextVar[_Run | None] = ContextVar("run", default=None)


@contextmanager
def running(limits: Limits) -> Iterator[None]:
    """Bounds what happens inside to these limits."""
    token = _run.set(_Run(limits))
    try:
        yield
    finally:
        _run.reset(token)


def check(size: int = 0) -> None:
    """Raises LimitError past the deadline, or if `size` characters are too many."""
    run = _run.get()
    if run is None:
        return
    if time.monotonic() > run.deadline:
        raise LimitError(f"takes longer than {run.limits.seconds} s")
    if size > run.limits.characters:
        raise LimitError(f"makes more than {run.limits.characters} characters")


def _size(value: Any) -> int:
    return len(value) if isinstance(value, (str, list, tuple)) else 1


def _checked(value: Any) -> Any:
    check(_size(value))
    return value


def _printed(value: Any) -> Any:
    """Counts every printed expression, also inside a captured block, which is not output yet."""
    if (run := _run.get()) is not None:
        run.printed += _size(value)
        check(run.printed)
    return value


# "%9999999d", "{:>9999999}", and a width that is an argument.
_WIDTH = re.compile(r"[%:][^a-zA-Z%}]*?(\d{6,})")
_WIDTH_ARGUMENT = re.compile(r"%[^a-zA-Z%]*\*|\{[^}]*:[^}]*\{")


def _check_format(form: str, values: Any) -> None:
    for width in _WIDTH.findall(form):
        check(int(width))
    if _WIDTH_ARGUMENT.search(form):
        _check_counts(values)


def _check_counts(values: Any) -> None:
    for value in values:
        if isinstance(value, int):
            check(abs(value))


def _check_replace(text: str, old: Any = "", new: Any = "", *_: Any) -> None:
    if isinstance(old, str) and isinstance(new, str):
        found = text.count(old) if old else len(text) + 1
        check(len(text) + found * len(new))


def _check_join(separator: str, parts: Any = (), *_: Any) -> None:
    if isinstance(parts, (list, tuple)):
        check(sum(_size(part) + len(separator) for part in parts))


# What str methods and filters with large results have to pass first: (text, *arguments).
_COSTLY: dict[str, Callable[..., None]] = {
    "center": lambda text, *values: _check_counts(values),
    "ljust": lambda text, *values: _check_counts(values),
    "rjust": lambda text, *values: _check_counts(values),
    "zfill": lambda text, *values: _check_counts(values),
    "expandtabs": lambda text, *values: _check_counts(values),
    "indent": lambda text, *values: _check_counts(values),
    "batch": lambda text, *values: _check_counts(values),
    "slice": lambda text, *values: _check_counts(values),
    "format": lambda text, *values: _check_format(text, values),
    "format_map": lambda text, values: _check_format(text, values.values()),
    "replace": _check_replace,
    "join": _check_join,
}


class Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's immutable sandbox within limits, set up as transformers sets it up."""

    intercepted_binops = frozenset(["*", "**", "%", "+"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[Generation, loopcontrols],
            finalize=_printed,
        )
        for name in ("center", "indent", "batch", "slice", "format"):
            self.filters[name] = _guarded(self.filters[name], _COSTLY[name])
        self.filters["replace"] = _guarded(self.filters["replace"], _check_replace_filter)
        self.filters["join"] = _guarded(self.filters["join"], _check_join_filter)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """An operator that can make much out of little."""
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, (str, list, tuple)) and isinstance(times, int):
                    check(len(value) * times)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            check(left.bit_length() * right)
        elif operator == "%" and isinstance(left, str):
            _check_format(left, right if isinstance(right, tuple) else (right,))
        elif operator == "+" and isinstance(left, (str, list, tuple)):
            check(len(left) + _size(right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """A call: of a str method, a macro, a global."""
        check()
        # `a ~ b` is not intercepted; what it made is seen when it is passed on.
        for value in (*args, *kwargs.values()):
            _checked(value)
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            costly = _COSTLY.get(getattr(__obj, "__name__", ""))
            if costly:
                costly(owner, *args, *kwargs.values())
        return super().call(__context, __obj, *args, **kwargs)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """An attribute, or the item of that name."""
        return _checked(super().getattr(obj, attribute))

    def getitem(self, obj: Any, argument: Any) -> Any:
        """An item, or the attribute of that name."""
        return _checked(super().getitem(obj, argument))


def _check_replace_filter(_: Any, text: Any, *values: Any) -> None:
    _check_replace(str(text), *values)


def _check_join_filter(_: Any, parts: Any, separator: Any = "", *rest: Any) -> None:
    _check_join(str(separator), parts)


def _guarded(function: Callable, first: Callable[..., None]) -> Callable:
    """A filter that is checked first; keeps jinja's own marks on it."""

    def guarded(*args: Any, **kwargs: Any) -> Any:
        first(*args, *kwargs.values())
        return function(*args, **kwargs)

    for mark in ("jinja_pass_arg", "jinja_async_variant"):
        if hasattr(function, mark):
            setattr(guarded, mark, getattr(function, mark))
    return guarded


class Generation(Extension):
    """`{% generation %}...{% endgeneration %}`: marks an assistant's words for training."""

    tags = {"generation"}  # noqa: RUF012 (as the base class has it)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Its content, as if the tags were not there."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)
