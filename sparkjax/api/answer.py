"""One answer: engine events in, pieces of text out.

Everything between token ids and what a client sees happens here, token by token, so that the sum
of the pieces does not depend on how tokens were grouped into events: text is decoded
incrementally, stop strings are held back and cut off, a parser tells reasoning, content and calls
apart, and each token's log-probability is released once content from it is.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable

from sparkjax.engine.plan import Event, TokenLogprob
from sparkjax.text import events
from sparkjax.text.detokenizer import Detokenizer
from sparkjax.text.parsing import Machine
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
      events: as every surface folds them.
      scored: tokens of its content.
      first: this is the first piece; `prompt_logprobs` come with it.
      finish: "stop", "length" or "tool_calls" in the last piece.
    """

    events: tuple[events.Event, ...] = ()
    scored: tuple[Scored, ...] = ()
    finish: str | None = None
    first: bool = False
    prompt_logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def text(self) -> str:
        """What is new of its content."""
        return "".join(e.text for e in self.events if isinstance(e, events.ContentDelta))


@dataclasses.dataclass(frozen=True)
class _Held:
    """A token whose text is not certain yet: characters `start` to `end` of all text."""

    scored: Scored
    end: int
    silent: bool


class Answer:
    """The state of one answer.

    Args:
      stops: stop strings.
      stop_ids: tokens that end the answer and are no part of it.
      before: prompt tokens that the text continues, for a continuation; an answer of its own
        (a chat turn) has none.
      parser: tells reasoning, content and calls apart; None: all text is content.
      one_call: the first complete call ends the answer.
      budget: the most tokens of reasoning.

    Attributes:
      generated: the tokens, those that no text came from too.
      over_budget: reasoning has reached its budget and has to end; nothing more is taken until
        `inject` has ended it.
      tokens: generated tokens that count: all through the one that completed a stop string.
      reasoning_tokens: those of its reasoning, the closing tag included.
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
        parser: Machine | None = None,
        one_call: bool = False,
        budget: int | None = None,
    ):
        self._budget, self._injected = budget, False
        self.over_budget = False
        self.generated: list[int] = []
        self._tokenizer, self._stop_ids = tokenizer, frozenset(stop_ids)
        self._parser, self._one_call = parser, one_call
        tags = parser.control if parser is not None else ()
        self._tags = {id: tag for tag in tags if (id := tokenizer.token_id(tag)) is not None}
        self._detokenizer = Detokenizer(tokenizer, keep=self._tags)
        if before:  # a character may be half written, a leading space is no longer leading
            self._detokenizer.push(before)
        self._matcher = StopMatcher(stops)
        self._decoded = self._released = 0  # characters
        self._segments: deque[tuple[int, bool]] = deque()
        self._ready = ""
        self._events: list[events.Event] = []
        self._complete = 0
        self._last = 0  # the end of the newest content
        self._held: deque[_Held] = deque()
        self._begun = False
        self.tokens = self.cached = self.reasoning_tokens = 0
        self.finish: str | None = None
        self.error: str | None = None
        self.text_stop: str | None = None

    def push(self, event: Event) -> Piece | None:
        """Takes an event; returns what became certain with it, or None if nothing did."""
        if self.finish is not None or self.over_budget:
            return None
        if not self._injected:  # later it is about more than the client's prompt
            self.cached = max(self.cached, event.cached)
        if event.finish == "error" or event.error is not None:
            self.finish, self.error = "error", event.error or "unknown error"
            return None
        entries: tuple[TokenLogprob | None, ...] = event.logprobs or (None,) * len(event.tokens)
        for token, entry in zip(event.tokens, entries, strict=True):
            self._take(token, entry)
            if self.finish is not None or self._spent():
                break
        if event.finish is not None and self.finish is None:
            self.over_budget = False  # it ends by itself
            rest = self._detokenizer.flush()
            self._decode(rest, None)
            if self.finish is None:
                self._release(self._matcher.flush())
                # A request can be ended by the engine's own "cancelled" only as it shuts down.
                self._end("length" if event.finish == "length" else "stop")
        return self._piece(event.prompt_logprobs)

    def cut(self) -> Piece:
        """Ends the answer where it is, as the token limit would."""
        self.over_budget = False
        self._end("length")
        piece = self._piece(())
        assert piece is not None
        return piece

    def _piece(self, prompt_logprobs: tuple[TokenLogprob, ...]) -> Piece | None:
        first, self._begun = not self._begun, True
        found, self._events = tuple(_joined(self._events)), []
        piece = Piece(found, tuple(self._certain(found)), self.finish, first, prompt_logprobs)
        if piece.events or piece.scored or piece.finish or piece.prompt_logprobs:
            return piece
        self._begun = not first
        return None

    def _spent(self) -> bool:
        self.over_budget = (
            self._budget is not None
            and self.reasoning_tokens >= self._budget
            and self._parser is not None
            and self._parser.thinking
        )
        return self.over_budget

    def inject(self, tokens: Iterable[int]) -> None:
        """Text that the server puts in the model's mouth, to end its reasoning. It counts as no
        token of the answer, and no stop string is looked for in it."""
        self.over_budget, self._budget, self._injected = False, None, True
        self._release(self._matcher.flush())
        for token in tokens:
            text = self._detokenizer.push((token,))
            self._decoded += len(text)
            tag = self._tags.get(token)
            if self._parser is not None and text:
                plain = text[: len(text) - len(tag or "")]
                self._add(self._parser.feed(plain, False) if plain else [])
                self._add(self._parser.feed(tag, True) if tag else [])

    def _take(self, token: int, entry: TokenLogprob | None) -> None:
        self.tokens += 1
        self.generated.append(token)
        if token in self._stop_ids:  # committed by the engine, but no text of the answer
            return
        thinking = self._parser is not None and self._parser.thinking
        start = self._decoded
        text = self._detokenizer.push((token,))
        if entry is not None:
            silent = self._tokenizer.is_special(token) or not self._tokenizer.token_bytes(token)
            self._held.append(_Held(Scored(entry, start), start + len(text), silent))
        self._decode(text, self._tags.get(token))
        if thinking or (self._parser is not None and self._parser.thinking):
            self.reasoning_tokens += 1

    def _decode(self, text: str, tag: str | None) -> None:
        """New text, which ends with the control token that `tag` spells, if any."""
        self._decoded += len(text)
        if self._parser is not None:
            plain = len(text) - len(tag or "")
            self._segments += [(plain, False)] if plain else []
            self._segments += [(len(tag), True)] if tag else []
        certain, self.text_stop = self._matcher.push(text)
        self._release(certain)
        if self.text_stop is not None:
            self._end("stop")

    def _release(self, text: str) -> None:
        """Text that no stop string can take back."""
        if self._parser is None:
            if text:
                self._events.append(events.ContentDelta(text, self._released))
            self._released += len(text)
            return
        self._ready += text
        while self._segments and self._ready and self.finish is None:
            size, control = self._segments[0]
            if control and len(self._ready) < size:
                return  # a stop string has a part of it
            part, self._ready = self._ready[:size], self._ready[size:]
            self._segments.popleft()
            if len(part) < size:
                self._segments.appendleft((size - len(part), False))
            self._add(self._parser.feed(part, control))

    def _add(self, found: list[events.Event]) -> None:
        for each in found:
            self._events.append(each)
            if isinstance(each, events.ToolCallEnd):
                self._complete += 1
                if self._one_call:
                    self.finish = "tool_calls"
                    return

    def _end(self, reason: events.Finish) -> None:
        if self.finish is not None:
            return
        if self._parser is not None:
            if self._ready:  # of a control token, before the stop string that it runs into
                self._add(self._parser.feed(self._ready, False))
            self._add(self._parser.finish(reason))
        if self.finish is None:
            self.finish = "tool_calls" if self._complete and reason == "stop" else reason

    def _certain(self, found: tuple[events.Event, ...]):
        """The held tokens of new content. A token without text of its own may begin right at the
        end; at an end without a stop string all that is left of a plain answer counts."""
        for event in found:
            if isinstance(event, events.ContentDelta):
                self._last = event.at + len(event.text)
                yield from self._up_to(event.at, self._last)
        yield from self._up_to(self._last, self._last)
        if self._parser is None and self.finish is not None and self.text_stop is None:
            while self._held:
                yield self._held.popleft().scored

    def _up_to(self, begin: int, end: int):
        while self._held:
            held = self._held[0]
            start = held.scored.offset
            if start + (not held.silent) > end:
                return
            self._held.popleft()
            if self._parser is None or held.end > begin or start >= begin:
                yield held.scored


def _joined(found: list[events.Event]) -> list[events.Event]:
    """Adjacent pieces of one text as one."""
    joined: list[events.Event] = []
    for event in found:
        last = joined[-1] if joined else None
        match last, event:
            case events.ContentDelta(), events.ContentDelta() if (
                last.at + len(last.text) == event.at
            ):
                joined[-1] = events.ContentDelta(last.text + event.text, last.at)
            case events.ReasoningDelta(), events.ReasoningDelta():
                joined[-1] = events.ReasoningDelta(last.text + event.text)
            case events.ToolArgumentsDelta(), events.ToolArgumentsDelta() if (
                last.index == event.index
            ):
                joined[-1] = dataclasses.replace(last, text=last.text + event.text)
            case _:
                joined.append(event)
    return joined
