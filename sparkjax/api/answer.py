"""One answer: engine events in, pieces of text out.

Everything between token ids and what a client sees happens here, token by token, so that the sum
of the pieces does not depend on how tokens were grouped into events: text is decoded
incrementally, stop strings are held back and cut off, and each token's log-probability is released
once text from it is.
"""

from __future__ import annotations

import dataclasses
from collections import deque

from sparkjax.engine.plan import Event, TokenLogprob
from sparkjax.text import events
from sparkjax.text.detokenizer import Detokenizer
from sparkjax.text.stops import StopMatcher
from sparkjax.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Scored:
    """A token of the answer with its log-probabilities.

    Attributes:
      offset: characters of the answer before it. Tokens that share a character have the same.
    """

    entry: TokenLogprob
    offset: int


@dataclasses.dataclass(frozen=True)
class Piece:
    """What is new of an answer.

    Attributes:
      first: this is the first piece; `prompt_logprobs` come with it.
      finish: "stop" or "length" in the last piece.
    """

    text: str = ""
    scored: tuple[Scored, ...] = ()
    finish: str | None = None
    first: bool = False
    prompt_logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def events(self) -> tuple[events.Event, ...]:
        """What is new as events."""
        return (events.ContentDelta(self.text),) if self.text else ()


class Answer:
    """The state of one answer.

    Args:
      stops: stop strings.
      stop_ids: tokens that end the answer and are no part of it.
      before: prompt tokens that the text continues, for a continuation; an answer of its own
        (a chat turn) has none.

    Attributes:
      tokens: generated tokens that count: all through the one that completed a stop string.
      cached: prompt tokens that were not computed.
      finish: why it ended, None before.
      error: why it failed.
      text_stop: the stop string that was found.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: tuple[str, ...] = (),
        stop_ids: tuple[int, ...] = (),
        before: tuple[int, ...] = (),
    ):
        self._tokenizer, self._stop_ids = tokenizer, frozenset(stop_ids)
        self._detokenizer = Detokenizer(tokenizer)
        if before:  # a character may be half written, a leading space is no longer leading
            self._detokenizer.push(before)
        self._matcher = StopMatcher(stops)
        self._decoded = self._released = 0  # characters
        self._held: deque[tuple[Scored, bool]] = deque()
        self._begun = False
        self.tokens = self.cached = 0
        self.finish: str | None = None
        self.error: str | None = None
        self.text_stop: str | None = None

    def push(self, event: Event) -> Piece | None:
        """Takes an event; returns what became certain with it, or None if nothing did."""
        if self.finish is not None:
            return None
        self.cached = max(self.cached, event.cached)
        if event.finish == "error" or event.error is not None:
            self.finish, self.error = "error", event.error or "unknown error"
            return None
        entries: tuple[TokenLogprob | None, ...] = event.logprobs or (None,) * len(event.tokens)
        text = ""
        for token, entry in zip(event.tokens, entries, strict=True):
            text += self._take(token, entry)
            if self.finish is not None:
                break
        if event.finish is not None and self.finish is None:
            text += self._emit(self._detokenizer.flush())
            if self.finish is None:
                text += self._release(self._matcher.flush())
                # A request can be ended by the engine's own "cancelled" only as it shuts down.
                self.finish = "length" if event.finish == "length" else "stop"
        first, self._begun = not self._begun, True
        piece = Piece(text, tuple(self._certain()), self.finish, first, event.prompt_logprobs)
        if piece.text or piece.scored or piece.finish or piece.prompt_logprobs:
            return piece
        self._begun = not first
        return None

    def _take(self, token: int, entry: TokenLogprob | None) -> str:
        self.tokens += 1
        if token in self._stop_ids:  # committed by the engine, but no text of the answer
            return ""
        if entry is not None:
            silent = self._tokenizer.is_special(token) or not self._tokenizer.token_bytes(token)
            self._held.append((Scored(entry, self._decoded), silent))
        text = self._detokenizer.push((token,))
        self._decoded += len(text)
        return self._emit(text)

    def _emit(self, text: str) -> str:
        emitted, self.text_stop = self._matcher.push(text)
        if self.text_stop is not None:
            self.finish = "stop"
        return self._release(emitted)

    def _release(self, text: str) -> str:
        self._released += len(text)
        return text

    def _certain(self):
        """The held tokens that begin before the end of the released text; a token without text of
        its own may begin right at it. At an end without a stop string: all."""
        everything = self.finish is not None and self.text_stop is None
        while self._held:
            scored, silent = self._held[0]
            if not everything and scored.offset + (not silent) > self._released:
                return
            self._held.popleft()
            yield scored
