"""Who may come in: limits that hold together, requests that can ever fit, and the waiting line."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

from .records import Limits, Submit
from .sequence import pages_for

SKIP_AHEAD = 8
"""How many later requests may be admitted before one that does not fit yet. A small request
need not wait for a big one's pages, yet after this many the pages that free up are kept for it."""


def check_limits(limits: Limits) -> None:
    """Raises ValueError, naming the field, unless the limits can serve at least something."""
    for name in ("slots", "pages", "page_size", "context", "queue", "busy_tiles", "idle_tiles"):
        if getattr(limits, name) < 1:
            raise ValueError(f"limits.{name}: {getattr(limits, name)} is below 1")
    for name in ("tiles", "rows"):
        sizes = getattr(limits, name)
        if not sizes or sizes[0] < 1 or any(a >= b for a, b in itertools.pairwise(sizes)):
            raise ValueError(f"limits.{name}: {sizes} is not a rising list of sizes from 1 on")
    if limits.rows[-1] < limits.slots:
        raise ValueError(
            f"limits.rows: the largest, {limits.rows[-1]}, is below the {limits.slots} slots"
        )
    if limits.admission not in ("reserve", "grow"):
        raise ValueError(f"limits.admission: {limits.admission!r} is neither 'reserve' nor 'grow'")
    if limits.window < 1:
        raise ValueError(f"limits.window: {limits.window} is below 1")


def refusal(submit: Submit, limits: Limits) -> str | None:
    """Why this request can never be served ("field: what against which limit"), or None."""
    prompt, more = len(submit.tokens), submit.max_tokens
    if not prompt:
        return "prompt: it has no tokens"
    if more < 0:
        return f"max_tokens: {more} is below 0"
    if prompt > limits.context:
        return f"prompt: {prompt} tokens exceed the context of {limits.context} (limits.context)"
    if prompt + more > limits.context:
        return (
            f"max_tokens: {prompt} prompt tokens and {more} more exceed the context of"
            f" {limits.context} (limits.context)"
        )
    pages = pages_for(prompt + more, limits.page_size)
    if pages > limits.pages:
        field = "prompt" if pages_for(prompt, limits.page_size) > limits.pages else "max_tokens"
        return (
            f"{field}: {prompt} prompt tokens and {more} more need {pages} cache pages; there are"
            f" {limits.pages} (limits.pages)"
        )
    return None


def first_pages(submit: Submit, limits: Limits) -> int:
    """How many pages a request takes when it is admitted."""
    more = submit.max_tokens
    if limits.admission == "grow":
        more = min(more, limits.window)
    return pages_for(len(submit.tokens) + more, limits.page_size)


@dataclasses.dataclass(eq=False)
class _Waiting:
    submit: Submit
    overtaken: int = 0


class WaitingLine:
    """Requests in order of arrival. The oldest that fits goes first, within `SKIP_AHEAD`."""

    def __init__(self) -> None:
        self._line: dict[int, _Waiting] = {}

    def __len__(self) -> int:
        return len(self._line)

    def __contains__(self, id: int) -> bool:
        return id in self._line

    def append(self, submit: Submit) -> None:
        self._line[submit.id] = _Waiting(submit)

    def remove(self, id: int) -> None:
        """Raises KeyError if it does not wait."""
        del self._line[id]

    def take(self, fits: Callable[[Submit], bool]) -> Submit | None:
        """Removes and returns the oldest request that fits and may go, or None."""
        passed: list[_Waiting] = []
        for waiting in self._line.values():
            if fits(waiting.submit):
                for older in passed:
                    older.overtaken += 1
                del self._line[waiting.submit.id]
                return waiting.submit
            if waiting.overtaken >= SKIP_AHEAD:
                return None
            passed.append(waiting)
        return None
