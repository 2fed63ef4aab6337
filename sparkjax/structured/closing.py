"""Ways to an answer's end as tokens of one vocabulary: how they are spelled, and what is left of one."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from . import bits

_SAMPLE = b'{"name": "value", "items": [{"id": 12, "kind": "text"}]}'
_FREE_ENDS = re.compile(r'<\[(\d{1,9})\]>|suffix=("(?:[^"\\]|\\.)*")|/\(\?s:\.\*\)((?:\\x\{\w+\})+)/')
"""What ends text without quotes in the grammars of `call_writer`: a control token, a text, or what
stands in front of a control token."""


class Way(NamedTuple):
    """Tokens to a whole answer, and whether they begin inside of a string of JSON, and there right
    behind a backslash."""

    tokens: list[int]
    quoted: bool
    escaped: bool = False


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
        self._reach: dict[bytes, int] = {}  # bytes of the longest token that begins with two bytes
        for raw in self._ids:
            self._reach[raw[:2]] = max(self._reach.get(raw[:2], 0), len(raw))
        self._special = frozenset(silent)
        self.tokens_a_byte = len(self.spell(_SAMPLE)) / len(_SAMPLE) or 1.0
        """Tokens that a byte of JSON takes."""
        blank = np.array([not raw or raw[:1].isspace() for raw in tokens])
        quote = np.array([b'"' in raw or b"\\" in raw for raw in tokens])
        length = np.array([min(len(raw), 63) for raw in tokens])
        self._rank = (blank * 4 + quote * 2) * 64 - length
        self._best = np.argsort(self._rank, kind="stable")[:512]
        self._best_bit = (1 << self._best % 32).astype(np.uint32)
        opening = np.array([opens(raw) for raw in tokens])
        self.quiet = {True: bits.pack(~quote), False: bits.pack(~opening)}
        """uint32 [words] of ids that open nothing, inside of a string of JSON and outside."""
        self.escapes = bits.pack(np.array([b"\\" in raw for raw in tokens]))
        """uint32 [words] of ids with a backslash."""
        self.again = bits.pack(np.array([re.search(rb'".*[{\[,]', raw) is not None for raw in tokens]))
        """uint32 [words] of ids that open something behind a quote."""

    def ends_of(self, source: str) -> list[list[int]]:
        """What ends free text in a grammar, as tokens. What only looks like it, in a client's own
        texts, is left out."""
        controls, texts = [], []
        for control, text, front in _FREE_ENDS.findall(source):
            if control:
                if int(control) in self._special:
                    controls.append((int(control),))
                continue
            with contextlib.suppress(ValueError, OverflowError):
                codes = re.findall(r"\w+(?=\})", front)
                end = json.loads(text) if text else "".join(chr(int(code, 16)) for code in codes)
                texts.append(tuple(self.spell(end.encode())))
        return [list(each) for each in dict.fromkeys(controls + texts) if each]

    def text(self, token: int) -> bytes:
        """The bytes of an id."""
        return self._tokens[token]

    def spell(self, text: bytes) -> list[int]:
        """Few tokens with these bytes; [] where the vocabulary has no such tokens."""
        found, at = [], 0
        while at < len(text):
            length = min(self._reach.get(text[at : at + 2], 1), len(text) - at)
            while (token := self._ids.get(text[at : at + length])) is None:
                length -= 1
                if not length:
                    return []
            found.append(token)
            at += length
        return found

    def brief(self, way: Sequence[int]) -> list[int]:
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

    def best(self, row: np.ndarray) -> int | None:
        """Of the ids of a mask, uint32 [words], that without a blank in front, without a quote, and
        with the most text."""
        at = (row[self._best // 32] & self._best_bit).nonzero()[0]
        if len(at):
            return int(self._best[at[0]])
        fits = bits.ids(row)
        return int(fits[self._rank[fits].argmin()]) if len(fits) else None

    def special(self, token: int) -> bool:
        """Whether an id is no text."""
        return token in self._special

    def ends(self, token: int) -> bool:
        """Whether an id ends an answer."""
        return token in self._last

    def rest(self, way: Way, text: bytes, token: int | None = None) -> Way | None:
        """What is left of a way behind a text (of a token) that begins it; the state of a grammar
        follows from the bytes, however they are cut."""
        if token is not None and way.tokens[:1] == [token]:
            return Way(way.tokens[1:], *self.inside(way, text))
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
        return Way([*between, *way.tokens[at:]], *self.inside(way, text))

    def behind(self, way: Way, token: int) -> Iterator[Way]:
        """What a way may have become behind another token: its rest, but for blanks; what comes
        behind the number that it begins with; itself, where the token is text or a blank; what
        comes behind its first token."""
        text = self._tokens[token]
        inside = self.inside(way, text)
        close = self.rest(way, b"".join(text.split()))
        if close is not None:
            yield Way(close.tokens, *inside)
        if not way.quoted and text.lstrip().startswith(b'"'):  # a string with something in it
            opened = self.rest(way, b'""'[: text.count(b'"')])
            if opened is not None:
                yield Way(opened.tokens, *inside)
        head = b"".join(self._tokens[t] for t in way.tokens[:8])
        number = head[: len(head) - len(head.lstrip(b"0123456789.eE+-"))]
        if not inside[0] and number and (behind := self.rest(way, number)) is not None:
            yield Way(behind.tokens, *inside)
        if not inside[1]:  # it would escape what comes next
            yield Way(way.tokens, *inside)
            yield Way(way.tokens[1:], *inside)

    def inside(self, way: Way, text: bytes) -> tuple[bool, bool]:
        """Whether a text at a way's beginning ends inside of a string of JSON, and behind a
        backslash there."""
        quotes = Quotes(way.quoted, way.escaped)
        quotes.follow(text)
        return quotes.quoted, quotes.escaped

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


class Quotes:
    """Where a way stands: inside of a string of JSON or outside.

    Attributes:
      quoted: inside.
      escaped: right behind a backslash inside.
      length: tokens since the last quote.
      uses: bytes since then.
    """

    def __init__(self, quoted: bool, escaped: bool = False):
        self.quoted, self.escaped, self.length, self.uses = quoted, escaped, 0, b""

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
