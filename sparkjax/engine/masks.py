"""The grammars of the requests that run: from committed tokens to the masks of the next step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..structured.bits import words
from ..structured.grammars import Grammars
from ..structured.matcher import GrammarError, Matcher
from .plan import Row
from .records import Submit


class Masks:
    """Where each constrained request stands. The engine's thread only.

    All ranks take the same tokens in the same order and meet the same counted limits, so they make
    the same masks.

    Args:
      grammars: makes or gives the model's grammars; called with the first constrained request.
      vocab: ids of the model.
    """

    def __init__(self, grammars: Callable[[], Grammars], vocab: int):
        self._grammars, self._words = grammars, words(vocab)
        self._matchers: dict[int, Matcher] = {}
        self._errors: dict[int, str] = {}

    def begin(self, request: Submit) -> None:
        """A request got its slot: its grammar is compiled beside the prompt's tiles."""
        if request.grammar is not None:
            try:
                self._grammars().prepare(request.grammar.source)
            except GrammarError as error:
                self._errors[request.id] = str(error)

    def first(self, request: Submit) -> np.ndarray | None:
        """uint32 [1, words], the mask of an answer's first token; None allows all."""
        grammar = request.grammar
        if grammar is None:
            return None
        out = self._all(1)
        if request.id not in self._errors:
            try:
                matcher = self._grammars().matcher(
                    grammar.source, grammar.after, request.max_tokens
                )
            except GrammarError as error:
                self._errors[request.id] = str(error)
            else:
                self._matchers[request.id] = matcher
                matcher.masks(out)
        return out

    def needed(self, rows: tuple[Row, ...]) -> bool:
        """Whether some row of a step has a grammar."""
        return any(row.request.grammar is not None for row in rows)

    def of(self, rows: tuple[Row, ...], size: int) -> np.ndarray:
        """uint32 [size, words], the masks of a step. All earlier tokens must have been taken."""
        out = self._all(size)
        for at, row in enumerate(rows):
            matcher = self._matchers.get(row.request.id)
            if matcher is not None and matcher.error is None:
                matcher.masks(out[at : at + 1])
        return out

    def take(self, request: Submit, token: int) -> str | None:
        """A token was committed. Returns why the request cannot go on, if it cannot: then the
        token is none of its grammar."""
        matcher = self._matchers.get(request.id)
        if matcher is not None:
            if matcher.error is None:
                matcher.advance(token)
            if matcher.error is not None and request.grammar is not None:
                self._grammars().forget(request.grammar.source)
            return matcher.error
        return self._errors.get(request.id)

    def release(self, id: int) -> None:
        """The request ended."""
        self._matchers.pop(id, None)
        self._errors.pop(id, None)

    def __len__(self) -> int:
        return len(self._matchers.keys() | self._errors.keys())

    def _all(self, rows: int) -> np.ndarray:
        return np.full((rows, self._words), 0xFFFFFFFF, np.uint32)
