"""Reading a text that is not all there yet: the lower half of every parser.

A reader is a generator that reads as if all text were there and waits where it is not: any cutting
of the text runs the same code over the same characters.

In token mode a control token is one private mark in the buffer (a lone surrogate, which decoded
UTF-8 never holds), so that its spelling in ordinary text is no tag.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

from sparkjax.text.events import Finish

from .json_text import JsonScanner, Malformed

LONGEST_NAME = 256
_MARK = 0xDC00
_SPACE = re.compile(r"\s+")
_T = TypeVar("_T")
Reading = Generator[None, None, _T]
"""A reader that may wait for more text."""


class Ended(Exception):
    """The text ended inside of something."""


class Tags:
    """A set of strings to look for, none of which begins another one."""

    def __init__(self, spellings: tuple[str, ...]):
        self.longest = max(map(len, spellings), default=0)
        ordered = sorted(spellings, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, ordered))) if ordered else None
        self._begins = frozenset(s[:n] for s in spellings for n in range(1, len(s)))
        self._firsts = frozenset(s[0] for s in spellings)

    def held(self, text: str, start: int) -> int:
        """How many characters at the end of `text[start:]` could be the beginning of a tag."""
        begin = max(start, len(text) - self.longest + 1)
        for i in range(begin, len(text)):
            if text[i] in self._firsts and text[i:] in self._begins:
                return len(text) - i
        return 0


class Reader:
    """The text so far and a place in it.

    Attributes:
      text_mode: tags are found in the text, whatever tokens it came from.
    """

    def __init__(self) -> None:
        self.text_mode = True
        self._marks: dict[str, str] = {}
        self._spellings: dict[int, str] = {}
        self._tags: dict[tuple[str, ...], Tags] = {}
        self._buffer, self._position, self._consumed = "", 0, 0
        self._end: Finish | None = None
        self._raw: list[str] | None = None  # what was read since it was last set to a list

    def mark(self, spellings: Iterable[str]) -> None:
        """Token mode begins: these are control tokens."""
        self.text_mode = False
        marked = list(spellings)
        self._marks = {s: chr(_MARK + i) for i, s in enumerate(marked)}
        self._spellings = {_MARK + i: s for i, s in enumerate(marked)}

    def append(self, text: str, control: bool) -> None:
        """More text has come."""
        if control and not self.text_mode:
            text = self._marks.get(text, text)
        self._buffer = self._buffer[self._position :] + text
        self._position = 0

    def marked(self, spelling: str) -> str:
        """A spelling as it stands in the buffer: control tokens in it are marks."""
        for control, mark in self._marks.items():
            spelling = spelling.replace(control, mark)
        return spelling

    def spell(self, text: str) -> str:
        """Text from the buffer as a client reads it."""
        return text.translate(self._spellings) if self._spellings else text

    @property
    def at(self) -> int:
        """How many characters were read, marks counted as what they spell."""
        return self._consumed

    @property
    def ended(self) -> Finish | None:
        """How the text ended, once everything of it was read."""
        return self._end if self._position == len(self._buffer) else None

    @property
    def marks(self) -> frozenset[str]:
        """The marks of control tokens; none in text mode."""
        return frozenset(self._marks.values())

    def waiting(self, count: int) -> str:
        """The next characters that are there, at most `count`, not read."""
        return self._buffer[self._position : self._position + count]

    def scan(self, scanner: JsonScanner) -> str:
        """Reads as far as `scanner` goes."""
        return self.spell(self.take(scanner.scan(self._buffer, self._position) - self._position))

    def take(self, count: int) -> str:
        """Reads characters that are there."""
        text = self._buffer[self._position : self._position + count]
        self._position += count
        self._consumed += len(self.spell(text))
        if self._raw is not None:
            self._raw.append(text)
        return text

    def wait(self) -> Reading[None]:
        """Waits for more text.

        Raises:
          Ended: there is none.
        """
        if self._end is not None:
            raise Ended
        yield

    def peek(self) -> Reading[str]:
        """The next character, not read; "" at the end."""
        while self._position == len(self._buffer):
            if self._end is not None:
                return ""
            yield
        return self._buffer[self._position]

    def rest(self) -> str:
        """Reads what is left in the buffer."""
        return self.take(len(self._buffer) - self._position)

    def until(
        self, tags: tuple[str, ...], sink: Callable[[str, int], object]
    ) -> Reading[str | None]:
        """Reads up to one of the tags, which is read too; text in front goes to `sink` with its place.

        Returns:
          The tag as it was given; None at the end, where the beginning of a tag may be left.
        """
        found = self._tags.get(tags)
        if found is None:
            found = self._tags[tags] = Tags(tuple(map(self.marked, tags)))
        while True:
            match = found.pattern.search(self._buffer, self._position) if found.pattern else None
            stop = match.start() if match else len(self._buffer)
            if not match:
                stop -= found.held(self._buffer, self._position)
            if stop > self._position:
                place = self.at
                sink(self.take(stop - self._position), place)
            if match:
                return self.spell(self.take(len(match[0])))
            if self._end is not None:
                return None
            yield

    def here(self, pattern: re.Pattern[str]) -> str:
        """Reads what matches of the text that is there."""
        match = pattern.match(self._buffer, self._position)
        return self.take(len(match[0])) if match else ""

    def run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Reads a run of characters, as long as it is: `pattern` is one class of characters, `+`."""
        parts = []
        while True:
            parts.append(self.here(pattern))
            if self._position < len(self._buffer) or self._end is not None:
                return "".join(parts)
            yield

    def space(self) -> Reading[str]:
        """Reads white space."""
        return (yield from self.run(_SPACE))

    def looks_at(self, *spellings: str) -> Reading[str | None]:
        """Which of the spellings the text goes on with, not read."""
        marked = [(self.marked(s), s) for s in spellings]
        while True:
            possible = False
            rest = len(self._buffer) - self._position
            for text, spelling in marked:
                if self._buffer.startswith(text, self._position):
                    return spelling
                possible |= rest < len(text) and text.startswith(self._buffer[self._position :])
            if not possible or self._end is not None:
                return None
            yield

    def option(self, *spellings: str) -> Reading[str | None]:
        """Reads one of the spellings if the text goes on with it."""
        found = yield from self.looks_at(*spellings)
        if found is not None:
            self.take(len(self.marked(found)))
        return found

    def ahead(self, end: str, longest: int = LONGEST_NAME) -> Reading[str | None]:
        """The text in front of `end`, not read; None if that does not come soon."""
        while True:
            limit = self._position + longest
            place = self._buffer.find(end, self._position, limit)
            if place >= 0:
                return self.spell(self._buffer[self._position : place])
            if len(self._buffer) >= limit or self._end is not None:
                return None
            yield

    def expect(self, *spellings: str) -> Reading[str]:
        """Reads one of the spellings.

        Raises:
          Malformed: the text goes on differently.
          Ended: it ends.
        """
        found = yield from self.option(*spellings)
        if found is None:
            rest = self._buffer[self._position :]
            if self._end and any(self.marked(s).startswith(rest) for s in spellings):
                raise Ended
            raise Malformed
        return found

    def short(self, *ends: str, longest: int = LONGEST_NAME) -> Reading[tuple[str, str]]:
        """Reads a text of limited length and what ends it.

        Returns:
          (text, end).

        Raises:
          Malformed: none of the ends came.
          Ended: the text ended first.
        """
        marked = {self.marked(e): e for e in ends}
        width = max(map(len, marked))
        while True:
            limit = self._position + longest + width
            places = [
                (i, e) for e in marked if (i := self._buffer.find(e, self._position, limit)) >= 0
            ]
            if places:
                place, end = min(places)
                text = self.take(place - self._position)
                self.take(len(end))
                return self.spell(text), marked[end]
            if len(self._buffer) - self._position >= longest + width:
                raise Malformed
            yield from self.wait()
