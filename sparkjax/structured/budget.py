"""Answers that end before their tokens do.

A grammar keeps an answer on a valid way, but the way may be longer than the tokens that a client
allows: a string without a longest length goes on for ever. Near the end of its budget an answer is
therefore led to its end: first nothing is begun that could not be ended, then what is left is
written as briefly as the grammar allows. Answers that cannot end in time from their first token on
are not touched; nor is free text, which may end anywhere.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from . import bits
from .closing import Closing, Effort, Way, opens

HORIZON = 640
"""Tokens that are left when the way to the end is first looked for."""
LENIENT = 128
"""Spare tokens, were each one byte of JSON, at which an answer opens only what can still be closed;
more where one token has opened more. Above two thirds of it, what was not tried out may come, too."""
SPARE = 4
"""Spare tokens at which text goes on no longer: a cut character may take three to end."""
ESCAPE = 6
"""Tokens that an escape in a string of JSON may take."""
SHORT_MASK = 256
"""Ids of a mask that is a choice of a few texts, at most; a longer one is text."""
SEARCH, TRIALS = 20_000, 3_000
"""Effort (see `closing.Effort`) for the way itself, and for all trials before one token."""


class Budget:
    """What is left of the tokens of one answer.

    Args:
      closing: of the vocabulary.
      source: the answer's grammar.
      tokens: that the answer may have, its end among them.

    Attributes:
      tight: no token is left that could be done without.
    """

    def __init__(self, closing: Closing, source: str, tokens: int):
        self._closing, self.left = closing, tokens
        self._source = source
        self._look = HORIZON
        self._room = int(LENIENT * closing.tokens_a_byte)
        self._easy = self._room * 2 // 3
        self._way: Way | None = None
        self._tries: list[Way] = []
        self.tight = False

    @functools.cached_property
    def _ends(self) -> list[list[int]]:
        """Most answers end before these are asked for."""
        return self._closing.ends_of(self._source)

    def spend(self, token: int) -> None:
        """One token was committed."""
        self.left -= 1
        before, self._way, self._tries = self._way, None, []
        if before is not None:
            self._way = self._closing.rest(before, self._closing.text(token), token)
            self._tries = self._closing.behind(before, token)

    def near(self, tokens: int) -> bool:
        """Whether the end may matter within so many tokens."""
        return self.left - tokens <= HORIZON

    def narrow(self, automaton: Any, row: np.ndarray) -> None:
        """Takes from a mask, uint32 [words], what would not leave enough tokens to end."""
        self.tight = False
        if self.left > self._look:
            return
        accepting = automaton.is_accepting()
        self._way = Way([], False) if accepting else self._way or self._found(automaton)
        if self._way is None:
            self._look = self.left // 2
            return
        way = self._way.tokens
        spare = self.left - 1 - len(way)
        if spare < 0:
            return  # too late, or never possible
        if spare > self._room:
            self._look = self.left - max((spare - self._room) // 8, 1)
            return
        self.tight = spare <= SPARE
        text = bits.count(row) > min(SHORT_MASK, self._closing.size // 4)
        if accepting and text:
            return  # it may end anywhere
        if way and all(b"\x80" <= self._closing.text(t) < b"\xc0" for t in way):
            return  # a character that has begun is all that is missing, whichever it is
        if (
            text
            and self._way.quoted
            and spare > self._easy
            and not (row & self._closing.again).any()
        ):
            return  # a string that ends here opens nothing large
        kept, every = np.zeros_like(row), row
        if text:
            quiet = self._closing.quiet[self._way.quoted]
            every = row & ~quiet
            if spare > SPARE:
                kept = row & quiet
            if self._way.quoted:
                escapes = row & self._closing.escapes
                every &= ~escapes
                if spare > SPARE + ESCAPE:
                    kept |= escapes
        tried = self._that_fit(automaton, self._way, bits.ids(every), spare, accepting)
        bits.add(kept, [*way[:1], *tried])
        kept &= row
        if kept.any():
            row[:] = kept

    def _found(self, automaton: Any) -> Way | None:
        effort = Effort(SEARCH)
        way = self._closing.first_that_ends(automaton, self._tries, effort)
        if way is None:
            way = self._closing.shortest(automaton, effort, self._ends)
            if way is not None and self._tries:
                grown = len(way.tokens) - len(self._tries[0].tokens)
                self._room = max(self._room, grown + 2 * SPARE)
        return way

    def _that_fit(
        self, automaton: Any, way: Way, tokens: np.ndarray, spare: int, accepting: bool
    ) -> list[int]:
        """Tokens behind which the answer can be ended. Of those that differ only in the blanks
        around them, or (inside of a string) in the text before its end, one is tried; those that
        open something come first."""
        found: list[int] = []
        effort = Effort(TRIALS)
        groups = self._alike(way, tokens)
        tail = self._closing.tail(way)
        open_ways = []
        for key in sorted(groups, key=lambda key: not opens(key[1])):
            special, text = key
            alike = groups[key]
            if self._closing.ends(alike[0]):
                found += alike
                continue
            rest = None if special else self._closing.rest(way, text)
            after = None
            if rest is None or text != self._closing.text(alike[0]):
                after = automaton.deep_copy()
                after.try_consume_tokens(alike[:1])
                tries = [] if rest is None else [rest]
                tries += self._closing.behind(way, alike[0])
                tries.append(Way(tail, False))
                rest = self._closing.first_that_ends(after, tries, effort)
            if rest is None and after is not None:
                open_ways.append((text, alike, after))
            elif rest is not None and self._enough(rest, accepting):
                found += alike
        for text, alike, after in open_ways:  # what takes longer, with what effort is left
            rest = self._closing.shortest(after, effort, self._ends, tail)
            if rest is None:
                fits = spare > (2 * SPARE if text.isdigit() else self._easy)
            else:
                fits = self._enough(rest, accepting)
            if fits:
                found += alike
        return found

    def _enough(self, rest: Way, accepting: bool) -> bool:
        return len(rest.tokens) + 2 <= self.left or (accepting and not rest.tokens)

    def _alike(self, way: Way, tokens: np.ndarray) -> dict[tuple[bool, bytes], list[int]]:
        found: dict[tuple[bool, bytes], list[int]] = {}
        for token in tokens.tolist()[: 8 * SHORT_MASK]:
            text = self._closing.text(token)
            if way.quoted and b'"' in text:
                text = text[text.index(b'"') :]
            key = self._closing.special(token), text if way.quoted else text.strip()
            found.setdefault(key, []).append(token)
        return found
