"""Answers that end before their tokens do.

A grammar keeps an answer on a valid way, but the way may be longer than the tokens that a client
allows: a string without a longest length goes on for ever. Near the end of its budget an answer is
therefore led to its end: first nothing is begun that could not be ended, then what is left is
written as briefly as the grammar allows. Answers that cannot end in time from their first token on
are not touched; nor is free text, which may end anywhere.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from . import bits
from .closing import Closing, Way
from .search import Effort, Search
from .shapes import Shape
from .trials import Trials, Tried

HORIZON = 640
"""Tokens that are left when the way to the end is first looked for; more where what may be begun is
large."""
LENIENT = 128
"""Spare tokens, were each one byte of JSON, at which an answer opens only what can still be closed;
more where what may be opened takes more. Above two thirds of it, what was not tried out may come,
too."""
SPARE = 4
"""Spare tokens at which text goes on no longer: a cut character may take three to end."""
ESCAPE = 6
"""Tokens that an escape in a string of JSON may take."""
SHORT_MASK = 256
"""Ids of a mask that is a choice of a few texts, at most; a longer one is text."""
SEARCH = 20_000
"""Effort (see `search.Effort`) for the way itself."""


class Budget:
    """What is left of the tokens of one answer.

    Args:
      closing: of the vocabulary.
      source: the answer's grammar.
      shape: its shape.
      tokens: that the answer may have, its end among them.

    Attributes:
      tight: no token is left that could be done without.
    """

    def __init__(self, closing: Closing, source: str, shape: Shape, tokens: int):
        self._closing, self.left = closing, tokens
        self._search = Search(closing, source, shape)
        # Names may take more tokens than other text.
        record = int(shape.record * min(1.0, 1.5 * closing.tokens_a_byte)) + 2 * SPARE
        self._room = max(int(LENIENT * closing.tokens_a_byte), record * 3 // 2)
        self._easy = self._room * 2 // 3
        self._faster = max(8, record // 4)  # tokens of the way that one token may add
        self._look = self._horizon = max(HORIZON, 2 * self._room)
        self._inside = False, False
        """Whether the answer's text ends inside of a string of JSON, and behind a backslash there."""
        self._way: Way | None = None
        self._tried: list[Tried] = []
        self._last: tuple[Way, int, list[Tried]] | None = None
        """The way before the last token, that token, and what was tried out before it."""
        self._trials = Trials(closing, self._search, shape.regular, record)
        self.tight = False

    def spend(self, token: int, written: bool) -> None:
        """One token was committed; `written` says that it belongs to what the grammar is about."""
        self.left -= 1
        if written:
            self._inside = self._closing.inside(Way([], *self._inside), self._closing.text(token))
        before, self._way, self._last = self._way, None, None
        if before is not None:
            self._way = self._closing.rest(before, self._closing.text(token), token)
            self._last = before, token, self._tried

    def near(self, tokens: int) -> bool:
        """Whether the end may matter within so many tokens."""
        return self.left - tokens <= self._horizon

    def narrow(self, automaton: Any, row: np.ndarray) -> None:
        """Takes from a mask, uint32 [words], what would not leave enough tokens to end."""
        self.tight, self._tried = False, []
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
            self._look = self.left - max((spare - self._room) // self._faster, 1)
            return
        self.tight = spare <= SPARE
        text = bits.count(row) > min(SHORT_MASK, self._closing.size // 4)
        if accepting and text:
            return  # it may end anywhere
        if way and all(b"\x80" <= self._closing.text(t) < b"\xc0" for t in way):
            return  # a character that has begun is all that is missing, whichever it is
        kept, every = np.zeros_like(row), row
        if text:
            quiet = self._closing.quiet[self._way.quoted]
            if self._way.quoted and spare > self._easy:
                quiet = ~self._closing.again  # a string that ends here opens nothing large
            every = row & ~quiet
            if spare > SPARE:
                kept = row & quiet
            if self._way.quoted and spare <= self._easy:
                escapes = row & self._closing.escapes
                every &= ~escapes
                if spare > SPARE + ESCAPE:
                    kept |= escapes
        bits.add(kept, way[:1])
        self._tried = list(self._trials.each(automaton, self._way, every, self.left - 2, text))
        for tokens, begun, rest in self._tried:
            if rest is None:
                number = begun.isdigit() and not self._way.quoted
                fits = spare > (2 * SPARE if number else self._easy)
            else:
                fits = len(rest.tokens) + 2 <= self.left or (accepting and not rest.tokens)
            if fits:
                bits.add(kept, tokens)
        kept &= row
        if kept.any():
            row[:] = kept

    def _found(self, automaton: Any) -> Way | None:
        effort = Effort(SEARCH)
        if self._last is None:
            return self._search.shortest(automaton, effort, self._inside)
        before, token, tried = self._last
        found = (t.rest for t in tried if t.rest is not None and token in t.tokens)
        ways = itertools.chain(found, self._closing.behind(before, token))
        way = self._search.first_that_ends(automaton, ways, effort)
        if way is None:
            way = self._search.shortest(automaton, effort, self._inside)
            if way is not None:
                grown = len(way.tokens) - len(before.tokens)
                self._room = max(self._room, grown + 2 * SPARE)
        return way
