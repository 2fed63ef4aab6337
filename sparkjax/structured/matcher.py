"""Where one answer stands in its grammar, and which tokens may come next."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from . import bits

if TYPE_CHECKING:
    from .budget import Budget

log = logging.getLogger(__name__)

LEAD = 2
"""Newline tokens that may stand between the closing tag of the reasoning and the answer proper."""


class GrammarError(ValueError):
    """A grammar that cannot be used, or that cannot go on; the message says why."""


@dataclasses.dataclass(frozen=True)
class Alphabet:
    """The tokens that masks are about.

    Attributes:
      tokens: the bytes of every id of the model's vocabulary; empty ones are never allowed.
      ends: ids that end an answer.
      free: uint32 [words], every id but the ends.
      newlines: uint32 [words], ids whose bytes are newlines only.
    """

    tokens: tuple[bytes, ...]
    ends: tuple[int, ...]
    free: np.ndarray
    newlines: np.ndarray

    @classmethod
    def of(cls, tokens: Sequence[bytes], ends: Sequence[int]) -> Alphabet:
        last = np.zeros(bits.words(len(tokens)), np.uint32)
        bits.add(last, ends)
        newlines = bits.pack(np.array([bool(raw) and not raw.strip(b"\n") for raw in tokens]))
        return cls(tuple(tokens), tuple(ends), ~last, newlines)


@dataclasses.dataclass
class _Place:
    """What beside the automaton changes with a token.

    `tail` is the end of the free text in front of the grammar, None once the grammar runs; `lead`
    counts the newline tokens that may still come in front of it.
    """

    tail: bytes | None
    lead: int
    ended: bool = False


class Matcher:
    """The state of one answer. Not thread-safe.

    Args:
      automaton: an `llguidance.LLMatcher` at its start, which becomes this object's own.
      after: text that comes first and is free (the closing tag of reasoning); "" begins at once.
      budget: the answer's tokens, in which it is led to its end; None lets it run.

    Attributes:
      error: why the grammar cannot go on, or None. It stays.
    """

    def __init__(
        self,
        automaton: Any,
        alphabet: Alphabet,
        after: str = "",
        budget: Budget | None = None,
    ):
        self._automaton, self._alphabet, self._budget = automaton, alphabet, budget
        self._after = after.encode()
        self._place = _Place(b"" if after else None, LEAD if after else 0)
        self.error: str | None = None

    @property
    def ended(self) -> bool:
        """An end token came."""
        return self._place.ended

    @property
    def complete(self) -> bool:
        """What came so far is a whole answer."""
        return self._place.tail is None and self._automaton.is_accepting()

    def advance(self, token: int) -> None:
        """Takes a token that was committed. One that the grammar does not allow sets `error`."""
        if not self._consume(token) and self.error is None:
            self.error = f"token {token} does not follow the grammar"
        if self._budget is not None:
            self._budget.spend(token, self._fed)

    def masks(self, out: np.ndarray, drafts: Sequence[int] = ()) -> int:
        """Fills uint32 out[0, words] for the next token, and out[i] for the one that follows
        drafts[:i], up to the first draft that the grammar refuses. The state stays as it is. Near
        the end of the budget it is one row: what may come then depends on what came.

        Returns:
          How many rows were filled: one, and one a draft that may come. Where the grammar cannot
          go on it sets `error` and fills out[0] with the ends alone.
        """
        if self._budget is not None and self._budget.near(len(drafts)):
            drafts = ()
        place = dataclasses.replace(self._place)
        fed = 0  # tokens that the automaton took
        count = 0
        for draft in [None, *drafts[: len(out) - 1]]:
            if draft is not None:
                if self._place.ended or not bits.has(out[count - 1], draft):
                    break
                if not self._consume(draft):
                    break
                fed += self._fed
            if not self._fill(out[count]):
                if count == 0:
                    self.error = self._reason()
                    _only(out[0], self._alphabet.ends)
                    count = 1
                break
            count += 1
        if fed:
            self._automaton.rollback(fed)
        self._place = place
        return count

    # --- One token --------------------------------------------------------------------------------

    _fed = False  # whether the last token that was consumed went into the automaton

    def _consume(self, token: int) -> bool:
        place, self._fed = self._place, False
        if place.ended:
            return True
        if token in self._alphabet.ends:
            place.ended = True
            return place.tail is None and self._automaton.is_accepting()
        raw = self._alphabet.tokens[token] if token < len(self._alphabet.tokens) else b""
        if place.tail is not None:
            return self._free(raw)
        if place.lead and raw and not raw.strip(b"\n"):
            place.lead -= 1
            return True
        place.lead = 0
        self._fed = self._automaton.try_consume_tokens([token]) == 1
        return self._fed

    def _free(self, raw: bytes) -> bool:
        """More text in front of the grammar, which begins with the token after the tag."""
        place = self._place
        assert place.tail is not None
        text = place.tail + raw
        at = text.find(self._after)
        if at < 0:
            place.tail = text[-len(self._after) :]
            return True
        place.tail = None
        return not text[at + len(self._after) :].strip()

    def _fill(self, row: np.ndarray) -> bool:
        place, alphabet = self._place, self._alphabet
        if place.ended:
            _only(row, alphabet.ends)
            return True
        if place.tail is not None:
            row[:] = alphabet.free
            return True
        self._automaton.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self._automaton.is_error():
            return False
        if self._budget is not None:
            try:
                self._budget.narrow(self._automaton, row)
            except Exception:  # the answer is valid without, and others have no part in it
                log.exception("an answer is not led to its end")
                self._budget = None
        if place.lead and not (self._budget is not None and self._budget.tight):
            row |= alphabet.newlines
        return bool(row.any())

    def _reason(self) -> str:
        said = self._automaton.get_error() if self._automaton.is_error() else ""
        return f"the grammar cannot go on: {said.strip() or 'no token of the vocabulary fits'}"


def _only(row: np.ndarray, tokens: Sequence[int]) -> None:
    row[:] = 0
    bits.add(row, tokens)
