"""The shortest way that is found from an answer's place in its grammar to the end.

A search that knows JSON and the formats of calls: it tries what closes, then what is needed before
that. In other grammars it may find no way.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from .closing import Closing, Quotes, Way
from .shapes import Shape

LONGEST = 512
"""Tokens of a way, at most."""
LOOK = 15
"""Effort of a mask."""
DEEPEST = 24
"""Equal tokens in a row outside of strings, at most: more are text, taken for brackets."""
TOLD = 10
"""Tokens of what is left of a way that tell whether all of it may come, in a regular grammar."""
REMEMBERED, MOST_WANTED = 24, 4096
"""Bytes of a way that tell what had to come behind them, and how many such places are kept."""

_ENDS = {True: (b'"',), False: (b"}", b"]")}
"""What ends the innermost thing, inside of a string of JSON and outside."""
_NEEDED = {
    True: (b"@", b".", b":", b"-", b"/", b" "),
    False: (b":", b",", b'"', b"0", b"1", b"null", b"true", b"false", b"[", b"{"),
}
"""What may be needed before that, in this order; a pattern may want the former."""
_LONG = 6
"""Tokens inside of a string before they are tried."""
_NOT_FOR_EVER = frozenset([*_NEEDED[True], b"0"])
"""What may lead nowhere, as zeros behind a number's point do: three times between two quotes."""


_Place = tuple[bool, int, bytes]
"""Inside of a string, tokens since the last quote, the last bytes."""


@dataclasses.dataclass
class Effort:
    """How much may still be tried: tokens that an automaton takes or refuses, a mask for `LOOK` of
    them. Counted, so that every rank gives up at the same place."""

    left: int


class Search:
    """Finds ways in one answer, and remembers what its grammar wanted where.

    Args:
      closing: of the vocabulary.
      source: the answer's grammar.
      shape: its shape.
    """

    def __init__(self, closing: Closing, source: str, shape: Shape):
        self._closing, self._source = closing, source
        self._json = shape.json
        self._most = TOLD if shape.regular else LONGEST
        self._wanted: dict[_Place, list[int]] = {}
        self._row = np.zeros(len(closing.escapes), np.uint32)

    # Most answers end before these two are asked for.

    @functools.cached_property
    def _needed(self) -> dict[bool, list[tuple[bytes, list[int]]]]:
        return {
            quoted: [(text, tokens) for text in texts if (tokens := self._closing.spell(text))]
            for quoted, texts in _NEEDED.items()
        }

    @functools.cached_property
    def _ends(self) -> dict[bool, list[list[int]]]:
        plain = {q: [self._closing.spell(text) for text in texts] for q, texts in _ENDS.items()}
        return {True: plain[True], False: self._closing.ends_of(self._source) + plain[False]}

    def first_that_ends(self, automaton: Any, ways: Iterable[Way], effort: Effort) -> Way | None:
        """The first of some ways that leads from an automaton's state to a whole answer.

        Args:
          ways: what may be left of a way that did so, behind a token or two.
        """
        for way in ways:
            after = automaton.deep_copy()
            tokens = way.tokens[: self._most]
            taken = after.try_consume_tokens(tokens)
            effort.left -= taken + 1
            if taken == len(tokens) and (taken < len(way.tokens) or after.is_accepting()):
                return way
        return None

    def shortest(
        self,
        automaton: Any,
        effort: Effort,
        inside: tuple[bool, bool] | None = None,
        before: bytes = b"",
        tails: Sequence[Sequence[int]] = (),
    ) -> Way | None:
        """The shortest way found from an automaton's state to a whole answer, or None.

        Args:
          automaton: an `llguidance.LLMatcher`, which stays as it is.
          effort: what the search may take.
          inside: whether the state is inside of a string of JSON, and behind a backslash there, as
            it seems. Heeded where the answer is JSON; others have text that looks like it.
          before: the text that led to the state.
          tails: how it may go on somewhere outside of strings.
        """
        if self._json and inside is not None:
            way = self._walk(automaton.deep_copy(), effort, Quotes(*inside), LONGEST, before, tails)
            if way is not None:
                return Way(way, *inside)
        found, most = None, LONGEST
        for quoted in (False, True):
            way = self._walk(
                automaton.deep_copy(), effort, Quotes(quoted), most, before, tails
            )
            if way is not None:
                found, most = Way(way, quoted), len(way) - 1
        return found

    def _walk(
        self,
        automaton: Any,
        effort: Effort,
        place: Quotes,
        most: int,
        text: bytes,
        tails: Sequence[Sequence[int]],
    ) -> list[int] | None:
        """Tries what closes, then what is needed before that, then whatever fits: at most `most`
        tokens."""
        way: list[int] = []
        while not automaton.is_accepting():
            if (
                effort.left < 0
                or len(way) >= most
                or (not place.quoted and len(way) > DEEPEST and len({*way[-DEEPEST:]}) == 1)
            ):
                return None
            if way and not place.quoted:
                for tail in tails:
                    if self._takes(automaton, effort, tail):
                        if automaton.is_accepting():
                            return [*self._closing.brief(way), *tail]
                        automaton.rollback(len(tail))
            key = place.quoted, min(place.length, _LONG), text[-REMEMBERED:]
            taken = (
                self._ended(automaton, effort, place)
                or self._remembered(automaton, effort, key)
                or self._closed(automaton, effort, place)
                or self._any(automaton, effort)
            )
            if taken is None:
                return None
            if len(text) > 1 and len(self._wanted) < MOST_WANTED:
                self._wanted[key] = taken
            way += taken
            more = b"".join(map(self._closing.text, taken))
            text += more
            place.follow(more)
        return self._closing.brief(way)

    def _takes(self, automaton: Any, effort: Effort, tokens: Sequence[int]) -> bool:
        """Whether an automaton takes all of some tokens; it has none of them otherwise."""
        if not tokens:
            return False
        taken = automaton.try_consume_tokens(tokens)
        effort.left -= taken + 1
        if taken == len(tokens):
            return True
        if taken:
            automaton.rollback(taken)
        return False

    def _ended(self, automaton: Any, effort: Effort, place: Quotes) -> list[int] | None:
        """What ends the innermost thing, if it may end."""
        if place.escaped:
            return None
        for end in self._ends[place.quoted]:
            if self._takes(automaton, effort, end):
                return end
        return None

    def _remembered(
        self, automaton: Any, effort: Effort, key: _Place
    ) -> list[int] | None:
        """What the grammar took behind the same text before."""
        known = self._wanted.get(key)
        return known if known is not None and self._takes(automaton, effort, known) else None

    def _closed(self, automaton: Any, effort: Effort, place: Quotes) -> list[int] | None:
        """What is needed before the end."""
        if place.escaped or (place.quoted and place.length < _LONG):
            return None
        for text, tokens in self._needed[place.quoted]:
            if text in _NOT_FOR_EVER and place.uses.count(text[0]) > 2:
                continue
            if self._takes(automaton, effort, tokens):
                return tokens
        return None

    def _any(self, automaton: Any, effort: Effort) -> list[int] | None:
        """Whatever the grammar takes."""
        effort.left -= LOOK
        automaton.unsafe_compute_mask_ptr(self._row.ctypes.data, self._row.nbytes)
        best = None if automaton.is_error() else self._closing.best(self._row)
        if best is None or automaton.try_consume_tokens([best]) != 1:
            return None
        return [best]
