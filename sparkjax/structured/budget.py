"""Answers that end before their tokens do.

A grammar keeps an answer on a valid way, but the way may be longer than the tokens that a client
allows: a string without a longest length goes on for ever. Near the end of its budget an answer is
therefore led to its end: first nothing is begun that could not be ended, then what is left is
written as briefly as the grammar allows. Answers that cannot end in time from their first token on
are not touched; nor is free text, which may end anywhere.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from .closing import Closing, Way, ids

HORIZON = 640
"""Tokens that are left when the way to the end is first looked for."""
LENIENT = 96
"""Spare tokens at which an answer opens only what can still be closed."""
SPARE = 4
"""Spare tokens at which only the way itself is left: a cut character may take three to end."""
SHORT_MASK = 256
"""Ids of a mask that is a choice of a few texts, at most."""
MOST_OPENINGS = 24
"""Openings that are tried out before one token, at most."""
MOST_SEARCHES = 4
"""Those of them to which a way of their own is searched for, at most."""


class Budget:
    """What is left of the tokens of one answer.

    Args:
      closing: of the vocabulary.
      source: the answer's grammar.
      tokens: that the answer may have, its end among them.
    """

    def __init__(self, closing: Closing, source: str, tokens: int):
        self._closing, self.left = closing, tokens
        self._ends = closing.ends_of(source)
        self._look = HORIZON
        self._way: Way | None = None
        self._tries: list[Way] = []

    def spend(self, token: int) -> None:
        """One token was committed."""
        self.left -= 1
        before, self._way, self._tries = self._way, None, []
        if before is not None:
            self._way = self._closing.rest(before, token)
            self._tries = self._closing.behind(before, token)

    def near(self, tokens: int) -> bool:
        """Whether the end may matter within so many tokens."""
        return self.left - tokens <= HORIZON

    def narrow(self, automaton: Any, row: np.ndarray) -> None:
        """Takes from a mask, uint32 [words], what would not leave enough tokens to end."""
        if self.left > self._look or automaton.is_accepting():
            return
        if self._way is None:
            self._way = self._closing.first_that_ends(automaton, self._tries)
            if self._way is None:
                self._way = self._closing.shortest(automaton, self._ends)
            if self._way is None:
                self._look = self.left // 2
                return
        way = self._way.tokens
        spare = self.left - 1 - len(way)
        if spare < 0:
            return  # too late, or never possible
        if spare > LENIENT:
            self._look = self.left - max((spare - LENIENT) // 8, 1)
            self._way = None
            return
        if all(b"\x80" <= self._closing.text(t) < b"\xc0" for t in way):
            return  # a character that has begun is all that is missing, whichever it is
        kept, allowed = np.zeros_like(row), way[:1]
        if spare > SPARE:
            kept, groups = self._candidates(self._way, row)
            allowed = allowed + self._those_that_fit(automaton, self._way, groups)
        for token in allowed:
            kept[token // 32] |= np.uint32(1 << token % 32)
        kept &= row
        if kept.any():
            row[:] = kept

    def _candidates(self, way: Way, row: np.ndarray) -> tuple[np.ndarray, list[list[int]]]:
        """(what of a mask needs no trial, what does: tokens that differ in digits and in the
        blanks around them are one). A short mask is a choice, of a name or a value, and all of it is tried; a long one
        is text, in which only what opens something makes the way longer."""
        every = ids(row)
        if len(every) <= SHORT_MASK:
            alike = self._alike(every)
            if len(alike) <= MOST_OPENINGS:
                return np.zeros_like(row), alike
        quiet = row & self._closing.quiet[way.quoted]
        begins = [[token] for token in self._closing.begins(way.tokens)[1:]]
        if way.quoted:
            return quiet, begins
        return quiet, begins + self._alike(ids(row & ~quiet)[:SHORT_MASK])[:MOST_OPENINGS]

    def _those_that_fit(self, automaton: Any, way: Way, groups: list[list[int]]) -> list[int]:
        """Tokens behind which the answer can be ended."""
        found: list[int] = []
        searches = 0
        for tokens in groups:
            rest = self._closing.rest(way, tokens[0])
            if rest is None:
                after = automaton.deep_copy()
                if after.try_consume_tokens(tokens[:1]) != 1:
                    continue
                rest = self._closing.first_that_ends(after, self._closing.behind(way, tokens[0]))
                if rest is None and searches < MOST_SEARCHES:
                    searches += 1
                    rest = self._closing.shortest(after, self._ends, self._closing.tail(way))
            if rest is not None and len(rest.tokens) + 2 <= self.left:
                found += tokens
        return found

    def _alike(self, tokens: np.ndarray) -> list[list[int]]:
        found: dict[bytes, list[int]] = {}
        for token in tokens.tolist():
            text = self._closing.text(token).strip()
            found.setdefault(re.sub(rb"[0-9]", b"0", text), []).append(token)
        return list(found.values())
