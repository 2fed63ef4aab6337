"""The shortest way that is found to the end of an answer, so that it ends before its tokens do.

A grammar keeps an answer on a valid way, but the way may be longer than the tokens that a client
allows: a string without a longest length goes on for ever. Near the end of its budget an answer is
therefore led to the end (`Budget`): first nothing is begun that could not be ended, then what is left is
written as briefly as the grammar allows. Answers that cannot end in time from their first token on
are not touched; nor is free text, which may end anywhere. It is a search that knows JSON and the
formats of calls; in other grammars it may find no way, and the answer runs into its last token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

HORIZON = 640
"""Tokens that are left when the way to the end is first looked for."""
LENIENT = 96
"""Spare tokens at which an answer opens only what can still be closed."""
SPARE = 4
"""Spare tokens at which only the way itself is left: a cut character may take three to end."""
LONGEST_WALK = 512
"""Tokens of a way, at most."""
DEEPEST = 24
"""Brackets that a way closes in a row, at most: more are text, taken for brackets."""
SHORT_MASK = 256
"""Ids of a mask that is a choice of a few texts, at most."""
MOST_OPENINGS = 24
"""Openings that are tried out before one token, at most."""

_STRING = (b'"',)
_PLAIN = (b"}", b"]", b":", b",", b'"', b"0", b"1", b"null", b"true", b"false", b"[", b"{")
"""What is tried inside of a string of JSON, and outside, in this order."""
_LONG_STRING = (b'"', b"@", b".", b":", b"-", b"/", b" ")
"""The same inside of a string that went on for a while: a pattern may want one of them."""
_NOT_FOR_EVER = frozenset([*_LONG_STRING[1:], b"0"])
"""What may lead nowhere, as zeros behind a number's point do: three times between two quotes."""
_FREE_ENDS = re.compile(r'<\[(\d+)\]>|suffix=("(?:[^"\\]|\\.)*")|/\(\?s:\.\*\)((?:\\x\{\w+\})+)/')
"""What ends text without quotes in the grammars of `call_writer`: a control token, a text, or what
stands in front of a control token."""


class Closing:
    """Ways to the end over one vocabulary.

    Args:
      tokens: the bytes of every id; empty ones are never text.
      special: ids that are no text.
    """

    def __init__(self, tokens: Sequence[bytes], special: Sequence[int]):
        silent = set(special)
        self._tokens = tokens
        self._ids: dict[bytes, int] = {}
        for i, raw in enumerate(tokens):
            if raw and i not in silent:
                self._ids.setdefault(raw, i)
        self._longest = max(map(len, self._ids), default=0)
        self._special = frozenset(silent)
        # The order in which a token is chosen where nothing of the above fits: no blank in front, no
        # quote, then the longest.
        blank = np.array([not raw or raw[:1].isspace() for raw in tokens])
        quote = np.array([b'"' in raw or b"\\" in raw for raw in tokens])
        length = np.array([min(len(raw), 63) for raw in tokens])
        self._rank = (blank * 4 + quote * 2) * 64 - length
        opening = np.array([any(c in b'"\\{[,' for c in raw) for raw in tokens])
        self.quiet = {True: _words(~quote), False: _words(~opening)}
        """uint32 [words] of ids that open nothing, inside of a string of JSON and outside."""

    def ends_of(self, source: str) -> list[list[int]]:
        """What ends free text in a grammar, as tokens."""
        controls, texts = [], []
        for control, text, front in _FREE_ENDS.findall(source):
            if control:
                controls.append((int(control),))
            else:
                end = (
                    json.loads(text)
                    if text
                    else "".join(chr(int(code, 16)) for code in re.findall(r"\w+(?=\})", front))
                )
                texts.append(tuple(self.spell(end.encode())))
        return [list(each) for each in dict.fromkeys(controls + texts) if each]

    def text(self, token: int) -> bytes:
        """The bytes of an id."""
        return self._tokens[token]

    def spell(self, text: bytes) -> list[int]:
        """Few tokens with these bytes; [] where the vocabulary has no such tokens."""
        found, at = [], 0
        while at < len(text):
            token = next(self._prefixes(text[at : at + self._longest]), None)
            if token is None:
                return []
            found.append(token)
            at += len(self._tokens[token])
        return found

    def begins(self, way: Sequence[int]) -> list[int]:
        """Ids whose bytes begin the text of a way; the first of the way itself is among them."""
        text = b""
        for token in way:
            if token in self._special or len(text) > self._longest:
                break
            text += self._tokens[token]
        return [way[0], *self._prefixes(text[: self._longest])]

    def _prefixes(self, text: bytes) -> Iterator[int]:
        """Tokens that begin a text, the longest first."""
        for length in range(len(text), 0, -1):
            if (token := self._ids.get(text[:length])) is not None:
                yield token

    def shortest(
        self, automaton: Any, ends: Sequence[Sequence[int]] = ()
    ) -> tuple[list[int], bool] | None:
        """The shortest way found from an automaton's state to a whole answer.

        Args:
          automaton: an `llguidance.LLMatcher`, which stays as it is.
          ends: see `ends_of`.

        Returns:
          (tokens, whether the way begins inside of a string of JSON), or None: none was found.
        """
        found = None
        most = LONGEST_WALK
        for quoted in (False, True):
            way = self._walk(automaton.deep_copy(), ends, quoted, most)
            if way is not None:
                found, most = (way, quoted), len(way) - 1
        if found is None:
            return None
        way, quoted = found
        brief = self._brief(way)
        return (brief if automaton.validate_tokens(brief) == len(brief) else way), quoted

    def _walk(
        self, automaton: Any, ends: Sequence[Sequence[int]], quoted: bool, most: int
    ) -> list[int] | None:
        """Tries what closes, then what is needed before that, then whatever fits: at most `most`
        tokens."""
        way: list[int] = []
        place = _Quotes(quoted)
        row = np.zeros(len(self.quiet[True]), np.uint32)
        while not automaton.is_accepting():
            if len(way) >= most or (len(way) > DEEPEST and len({*way[-DEEPEST:]}) == 1):
                return None
            taken = self._close(automaton, ends, place) or self._any(automaton, row)
            if taken is None:
                return None
            way += taken
            place.follow(b"".join(self._tokens[t] for t in taken))
        return way

    def _close(
        self, automaton: Any, ends: Sequence[Sequence[int]], place: _Quotes
    ) -> list[int] | None:
        if place.escaped:
            return None
        for end in () if place.quoted else ends:
            taken = automaton.try_consume_tokens(list(end))
            if taken == len(end):
                return list(end)
            if taken:
                automaton.rollback(taken)
        for text in _PLAIN if not place.quoted else _STRING if place.length < 6 else _LONG_STRING:
            token = self._ids.get(text)
            if token is None or (place.uses.count(text[0]) > 2 and text in _NOT_FOR_EVER):
                continue
            if automaton.try_consume_tokens([token]) == 1:
                return [token]
        return None

    def _any(self, automaton: Any, row: np.ndarray) -> list[int] | None:
        automaton.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if automaton.is_error() or not row.any():
            return None
        fits = ids(row)
        chosen = int(fits[self._rank[fits].argmin()])
        return [chosen] if automaton.try_consume_tokens([chosen]) == 1 else None

    def _brief(self, way: Sequence[int]) -> list[int]:
        """The same text in few tokens; ids that are no text stay as they are."""
        found: list[int] = []
        text = b""
        for token in way:
            if token in self._special:
                found += [*self.spell(text), token]
                text = b""
            else:
                text += self._tokens[token]
        return found + self.spell(text)


class _Quotes:
    """Where a way stands: inside of a string of JSON or outside.

    Attributes:
      quoted: inside.
      escaped: right behind a backslash inside.
      length: tokens since the last quote.
      uses: bytes since then.
    """

    def __init__(self, quoted: bool):
        self.quoted, self.escaped, self.length, self.uses = quoted, False, 0, b""

    def follow(self, text: bytes) -> None:
        self.length += 1
        self.uses += text
        for byte in text:
            if self.escaped:
                self.escaped = False
            elif byte == ord("\\"):
                self.escaped = self.quoted
            elif byte == ord('"'):
                self.quoted, self.length, self.uses = not self.quoted, 0, b""


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
        self._way: list[int] | None = None
        self._quoted = False

    def spend(self, token: int) -> None:
        """One token was committed."""
        self.left -= 1
        follows = bool(self._way) and self._way[0] == token  # type: ignore[index]
        self._way = self._way[1:] if follows and self._way else None

    def near(self, tokens: int) -> bool:
        """Whether the end may matter within so many tokens."""
        return self.left - tokens <= HORIZON

    def narrow(self, automaton: Any, row: np.ndarray) -> None:
        """Takes from a mask, uint32 [words], what would not leave enough tokens to end."""
        if self.left > self._look or automaton.is_accepting():
            return
        if self._way is None:
            found = self._closing.shortest(automaton, self._ends)
            if found is None:
                self._look = self.left // 2
                return
            self._way, self._quoted = found
        spare = self.left - 1 - len(self._way)
        if spare < 0:
            return  # too late, or never possible
        if spare > LENIENT:
            self._look = self.left - max((spare - LENIENT) // 8, 1)
            self._way = None
            return
        if all(b"\x80" <= self._closing.text(t) < b"\xc0" for t in self._way):
            return  # a character that has begun is all that is missing, whichever it is
        kept, allowed = np.zeros_like(row), self._way[:1]
        if spare > SPARE:
            kept, groups = self._candidates(row)
            groups += [[token] for token in self._closing.begins(self._way)[1:]]
            allowed += [t for tokens in groups if self._fits(automaton, tokens[0]) for t in tokens]
        for token in allowed:
            kept[token // 32] |= np.uint32(1 << token % 32)
        row[:] = kept

    def _candidates(self, row: np.ndarray) -> tuple[np.ndarray, list[list[int]]]:
        """(what of a mask needs no trial, what does: tokens that differ in the blanks around them
        are one). A short mask is a choice, of a name or a value, and all of it is tried; a long one
        is text, in which only what opens something makes the way longer."""
        every = ids(row)
        if len(every) <= SHORT_MASK:
            alike = self._alike(every)
            if len(alike) <= MOST_OPENINGS:
                return np.zeros_like(row), alike
        quiet = row & self._closing.quiet[self._quoted]
        if self._quoted:
            return quiet, []
        return quiet, self._alike(ids(row & ~quiet)[:SHORT_MASK])[:MOST_OPENINGS]

    def _fits(self, automaton: Any, token: int) -> bool:
        """Whether the answer can be ended behind a token."""
        after = automaton.deep_copy()
        if after.try_consume_tokens([token]) != 1:
            return False
        found = self._closing.shortest(after, self._ends)
        return found is not None and len(found[0]) + 2 <= self.left

    def _alike(self, tokens: np.ndarray) -> list[list[int]]:
        found: dict[bytes, list[int]] = {}
        for token in tokens.tolist():
            found.setdefault(self._closing.text(token).strip(), []).append(token)
        return list(found.values())


def ids(row: np.ndarray) -> np.ndarray:
    """The ids of a mask, uint32 [words], rising."""
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))


def _words(ids: np.ndarray) -> np.ndarray:
    """bool [V] to uint32 [ceil(V / 32)]."""
    padded = np.zeros(-(-len(ids) // 32) * 32, bool)
    padded[: len(ids)] = ids
    return np.packbits(padded, bitorder="little").view(np.uint32)
