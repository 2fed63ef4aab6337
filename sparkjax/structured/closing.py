"""The shortest way that is found from an answer's place in its grammar to the end.

A search that knows JSON and the formats of calls: it tries what closes, then what is needed before
that. In other grammars it may find no way.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from . import bits

LONGEST_WALK = 512
"""Tokens of a way, at most."""
LOOK = 15
"""Effort of a mask."""
DEEPEST = 24
"""Brackets that a way closes in a row, at most: more are text, taken for brackets."""

_SAMPLE = b'{"name": "value", "items": [{"id": 12, "kind": "text"}]}'
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


class Way(NamedTuple):
    """Tokens to a whole answer, and whether they begin inside of a string of JSON."""

    tokens: list[int]
    quoted: bool


@dataclasses.dataclass
class Effort:
    """How much may still be tried: tokens that an automaton takes or refuses, a mask for `LOOK` of
    them. Counted, so that every rank gives up at the same place."""

    left: int


class Closing:
    """Ways to the end over one vocabulary.

    Args:
      tokens: the bytes of every id; empty ones are never text.
      special: ids that are no text.
      ends: those that end an answer.
    """

    def __init__(self, tokens: Sequence[bytes], special: Sequence[int], ends: Sequence[int]):
        silent = {*special, *ends}
        self._last = frozenset(ends)
        self.size = len(tokens)
        self._tokens = tokens
        self._ids: dict[bytes, int] = {}
        for i, raw in enumerate(tokens):
            if raw and i not in silent:
                self._ids.setdefault(raw, i)
        self._longest = max(map(len, self._ids), default=0)
        self._special = frozenset(silent)
        self.tokens_a_byte = len(self.spell(_SAMPLE)) / len(_SAMPLE) or 1.0
        """Tokens that a byte of JSON takes."""
        # The order in which a token is chosen where nothing of the above fits: no blank in front, no
        # quote, then the longest.
        blank = np.array([not raw or raw[:1].isspace() for raw in tokens])
        quote = np.array([b'"' in raw or b"\\" in raw for raw in tokens])
        length = np.array([min(len(raw), 63) for raw in tokens])
        self._rank = (blank * 4 + quote * 2) * 64 - length
        self._best = np.argsort(self._rank, kind="stable")[:512]
        opening = np.array([opens(raw) for raw in tokens])
        self.quiet = {True: bits.pack(~quote), False: bits.pack(~opening)}
        """uint32 [words] of ids that open nothing, inside of a string of JSON and outside."""
        self.escapes = bits.pack(np.array([b"\\" in raw for raw in tokens]))
        """uint32 [words] of ids with a backslash."""
        self.again = bits.pack(np.array([re.search(rb'".*[{\[,]', raw) is not None for raw in tokens]))
        """uint32 [words] of ids that open something behind a quote."""

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

    def special(self, token: int) -> bool:
        """Whether an id is no text."""
        return token in self._special

    def ends(self, token: int) -> bool:
        """Whether an id ends an answer."""
        return token in self._last

    def _prefixes(self, text: bytes) -> Iterator[int]:
        """Tokens that begin a text, the longest first."""
        for length in range(len(text), 0, -1):
            if (token := self._ids.get(text[:length])) is not None:
                yield token

    def rest(self, way: Way, text: bytes, token: int | None = None) -> Way | None:
        """What is left of a way behind a text (of a token) that begins it; the state of a grammar
        follows from the bytes, however they are cut."""
        if token is not None and way.tokens[:1] == [token]:
            return Way(way.tokens[1:], self._quoted(way, text))
        if token in self._special or not text:
            return None
        head, at = b"", 0
        while at < len(way.tokens) and len(head) < len(text):
            if way.tokens[at] in self._special:
                return None
            head += self._tokens[way.tokens[at]]
            at += 1
        between = self.spell(head[len(text) :])
        if not head.startswith(text) or (len(head) > len(text) and not between):
            return None
        return Way([*between, *way.tokens[at:]], self._quoted(way, text))

    def behind(self, way: Way, token: int) -> list[Way]:
        """What a way may have become behind another token: its rest, but for blanks; what comes
        behind the number that it begins with; itself, where the token is text or a blank; what
        comes behind its first token."""
        text = self._tokens[token]
        quoted = self._quoted(way, text)
        close = self.rest(way, b"".join(text.split()))
        found = [] if close is None else [Way(close.tokens, quoted)]
        if not way.quoted and text.lstrip().startswith(b'"'):  # a string with something in it
            opened = self.rest(way, b'""'[: text.count(b'"')])
            found += [] if opened is None else [Way(opened.tokens, quoted)]
        head = b"".join(self._tokens[t] for t in way.tokens[:8])
        number = head[: len(head) - len(head.lstrip(b"0123456789.eE+-"))]
        if not quoted and number and (behind := self.rest(way, number)) is not None:
            found.append(Way(behind.tokens, quoted))
        return [*found, Way(way.tokens, quoted), Way(way.tokens[1:], quoted)]

    def _quoted(self, way: Way, text: bytes) -> bool:
        quotes = _Quotes(way.quoted)
        quotes.follow(text)
        return quotes.quoted

    def tail(self, way: Way) -> list[int]:
        """What comes behind the first string of a way that ends."""
        text = b""
        for token in way.tokens:
            if token in self._special:
                break
            text += self._tokens[token]
        last = text.find(b'"', 0 if way.quoted else text.find(b'"') + 1)
        rest = self.rest(way, text[: last + 1])
        return [] if rest is None else rest.tokens

    def first_that_ends(self, automaton: Any, ways: Sequence[Way], effort: Effort) -> Way | None:
        """The first of some ways that leads from an automaton's state to a whole answer."""
        for way in ways:
            after = automaton.deep_copy()
            taken = after.try_consume_tokens(way.tokens)
            effort.left -= taken + 1
            if taken == len(way.tokens) and after.is_accepting():
                return way
        return None

    def shortest(
        self,
        automaton: Any,
        effort: Effort,
        ends: Sequence[Sequence[int]] = (),
        tail: Sequence[int] = (),
    ) -> Way | None:
        """The shortest way found from an automaton's state to a whole answer, or None.

        Args:
          automaton: an `llguidance.LLMatcher`, which stays as it is.
          effort: what the search may take.
          ends: see `ends_of`.
          tail: how it may go on behind the next string that ends.
        """
        found = None
        most = LONGEST_WALK
        for quoted in (False, True):
            way = self._walk(automaton.deep_copy(), effort, ends, quoted, most, tail)
            if way is not None:
                found, most = Way(way, quoted), len(way) - 1
        if found is None:
            return None
        brief = Way(self._brief(found.tokens), found.quoted)
        return self.first_that_ends(automaton, [brief], effort) or found

    def _walk(
        self,
        automaton: Any,
        effort: Effort,
        ends: Sequence[Sequence[int]],
        quoted: bool,
        most: int,
        tail: Sequence[int],
    ) -> list[int] | None:
        """Tries what closes, then what is needed before that, then whatever fits: at most `most`
        tokens."""
        way: list[int] = []
        place = _Quotes(quoted)
        row = np.zeros(len(self.quiet[True]), np.uint32)
        while not automaton.is_accepting():
            if (
                effort.left < 0
                or len(way) >= most
                or (len(way) > DEEPEST and len({*way[-DEEPEST:]}) == 1)
            ):
                return None
            taken = self._close(automaton, effort, ends, place) or self._any(automaton, effort, row)
            if taken is None:
                return None
            way += taken
            inside = place.quoted
            place.follow(b"".join(self._tokens[t] for t in taken))
            if tail and inside and not place.quoted:
                if self.first_that_ends(automaton, [Way([*tail], False)], effort):
                    return [*way, *tail]
                tail = ()
        return way

    def _close(
        self, automaton: Any, effort: Effort, ends: Sequence[Sequence[int]], place: _Quotes
    ) -> list[int] | None:
        if place.escaped:
            return None
        for end in () if place.quoted else ends:
            taken = automaton.try_consume_tokens(list(end))
            effort.left -= taken + 1
            if taken == len(end):
                return list(end)
            if taken:
                automaton.rollback(taken)
        for text in _PLAIN if not place.quoted else _STRING if place.length < 6 else _LONG_STRING:
            token = self._ids.get(text)
            if token is None or (place.uses.count(text[0]) > 2 and text in _NOT_FOR_EVER):
                continue
            effort.left -= 1
            if automaton.try_consume_tokens([token]) == 1:
                return [token]
        return None

    def _any(self, automaton: Any, effort: Effort, row: np.ndarray) -> list[int] | None:
        effort.left -= LOOK
        automaton.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if automaton.is_error() or not row.any():
            return None
        best = self._best[bits.has(row, self._best)]
        if not len(best):
            fits = bits.ids(row)
            best = fits[[self._rank[fits].argmin()]]
        chosen = int(best[0])
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


def opens(text: bytes) -> bool:
    """Whether a text outside of strings may begin what has to be ended."""
    return any(c in b'"\\{[,<(' for c in text)
