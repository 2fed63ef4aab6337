"""What would have to follow each of the tokens that may come next."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from . import bits
from .closing import Closing, Way, opens
from .search import Effort, Search

TRIALS, TRIALS_A_TOKEN = 3_000, 8
"""Effort for all trials before one token, at least, and for each token that a record takes."""
MOST = 2048
"""Tokens that are tried."""


class Tried(NamedTuple):
    """Tokens of which one was tried, what of its text counts, and a way from there to the end;
    None: there is none, or it takes too much to find."""

    tokens: list[int]
    text: bytes
    rest: Way | None


class Trials:
    """Those of one answer.

    Args:
      closing: of the vocabulary.
      search: the answer's.
      regular: see `shapes.Shape`.
      record: tokens of its record, about.
    """

    def __init__(self, closing: Closing, search: Search, regular: bool, record: int):
        self._closing, self._search, self._regular = closing, search, regular
        self._effort = max(TRIALS, TRIALS_A_TOKEN * record)
        self._way: list[int] = []
        self._tail: list[int] = []
        """The way, which is the same object while a string goes on, and what is behind its string."""
        self._known: dict[bytes, Way] = {}
        """How this string's end and what comes behind it were ended."""
        self._last: tuple[bytes, list[Tried]] = b"", []

    def each(
        self, automaton: Any, way: Way, row: np.ndarray, most: int, text: bool
    ) -> Iterator[Tried]:
        """The ids of a mask, in groups: of those that differ only in the blanks around them, or
        (inside of a string) in the text before its end, one is tried.

        Args:
          automaton: at the answer's place, which stays as it is.
          way: from there to the end.
          row: uint32 [words].
          most: tokens of a way that is of use.
          text: the place is inside of text, of which any more may come.
        """
        effort = Effort(self._effort)
        if self._way is not way.tokens:
            self._way, self._tail, self._known = way.tokens, self._closing.tail(way), {}
        harder = []
        for group in self._alike(way, row):
            tokens, text_, rest = group
            if rest is not None:
                yield group
                continue
            known = self._known.get(text_) if way.quoted else None
            # In a regular grammar nothing inside of a free string changes what is behind it.
            if known is not None and ((self._regular and text) or len(known.tokens) > most):
                yield Tried(tokens, text_, known)
                continue
            close = None if self._closing.special(tokens[0]) else self._closing.rest(way, text_)
            if close is not None and text_ == self._closing.text(tokens[0]):
                yield Tried(tokens, text_, close)  # it is the way
                continue
            after = automaton.deep_copy()
            after.try_consume_tokens(tokens[:1])
            ways = itertools.chain(
                (each for each in (known, close) if each is not None),
                self._closing.behind(way, tokens[0]),
                [Way(self._tail, False)],
            )
            rest = self._search.first_that_ends(after, ways, effort)
            if rest is None:
                harder.append((tokens, text_, after))
                continue
            if way.quoted:
                self._known[text_] = rest
            yield Tried(tokens, text_, rest)
        # What takes longer, with what effort is left; what opens something first.
        for tokens, text_, after in sorted(harder, key=lambda each: not opens(each[1])):
            raw = self._closing.text(tokens[0])
            inside = self._closing.inside(way, raw)
            rest = self._search.shortest(after, effort, inside, raw, [self._tail, way.tokens])
            if rest is not None and way.quoted:
                self._known[text_] = rest
            yield Tried(tokens, text_, rest)

    def _alike(self, way: Way, row: np.ndarray) -> list[Tried]:
        """Groups of ids; those that end the answer have nothing behind them. Kept for the next
        token, before which a string's mask is mostly the same."""
        key = row.tobytes() + bytes([way.quoted])
        if self._last[0] != key:
            groups: dict[tuple[bool, bytes], list[int]] = {}
            for token in bits.ids(row)[:MOST].tolist():
                text = self._closing.text(token)
                if not way.quoted:
                    text = text.strip()
                elif b"\\" not in text:
                    text = text[max(text.find(b'"'), 0) :]
                groups.setdefault((self._closing.special(token), text), []).append(token)
            self._last = key, [
                Tried(tokens, text, Way([], False) if self._closing.ends(tokens[0]) else None)
                for (_, text), tokens in groups.items()
            ]
        return self._last[1]
