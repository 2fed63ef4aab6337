"""Text generation as a library call: the serving engine, driven in the caller's thread."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from .engine.engine import Engine
from .engine.limits import make_limits
from .engine.plan import Event, TokenLogprob
from .engine.records import Grammar, Sampling, Submit
from .text.detokenizer import Detokenizer

Prompt = str | Sequence[int]


@dataclasses.dataclass(frozen=True)
class Generation:
    """One finished answer.

    Attributes:
      tokens: the generated ids (a final stop id included).
      text: their text, special tokens left out.
      finish: "stop" or "length".
      logprobs: one entry a token when asked for.
    """

    tokens: tuple[int, ...]
    text: str
    finish: str
    logprobs: tuple[TokenLogprob, ...] = ()


class Generator:
    """Generates with one model; keeps its caches and compiled programs between calls."""

    def __init__(self, model: Any, slots: int = 8, context: int | None = None):
        self.model, self._slots, self._context = model, slots, context

    @functools.cached_property
    def engine(self) -> Engine:
        """Made when it is first needed, and anew where a run broke off."""
        limits = make_limits(self.model, slots=self._slots, context=self._context)
        return Engine(self.model, limits)

    def run(self, submits: list[Submit]) -> Iterator[list[Event]]:
        """Runs requests to their ends, a list of events a tick."""
        yield self.engine.tick(tuple(submits))
        while not self.engine.idle:
            yield self.engine.tick()

    def generate(
        self,
        prompts: Sequence[Prompt],
        max_tokens: int = 256,
        sampling: Sampling | None = None,
        stop_ids: tuple[int, ...] | None = None,
        grammar: Grammar | None = None,
    ) -> list[Generation]:
        """Answers to several prompts, batched. Prompts are text (encoded as a document, control
        tokens in it are ordinary text) or token ids.

        Args:
          grammar: what every answer has to follow: `Grammar(source(wanted).text)`, with `source`
            and `Wanted` of `sparkjax.structured.sources`.

        Raises:
          ValueError: a prompt that cannot be served, with the limit that it meets.
        """
        sampling = sampling or Sampling()
        stops = self.model.config.eos if stop_ids is None else stop_ids
        submits = []
        for prompt in prompts:
            tokens = self.model.encode(prompt) if isinstance(prompt, str) else prompt
            room = self.engine.limits.context - len(tokens)
            request = Submit(
                self.engine.new_id(),
                tuple(int(t) for t in tokens),
                max(min(max_tokens, room), 1),
                sampling,
                tuple(stops),
                grammar=grammar,
            )
            reason = self.engine.scheduler.refusal(request)
            if reason is not None:
                raise ValueError(reason)
            submits.append(request)
        found: dict[int, list[Event]] = {s.id: [] for s in submits}
        try:
            for events in self.run(submits):
                for event in events:
                    found[event.id].append(event)
        except BaseException:  # ctrl-c: requests of this call are in it, perhaps half of a tick
            self.__dict__.pop("engine", None)
            raise
        return [self._join(found[s.id]) for s in submits]

    def _join(self, events: list[Event]) -> Generation:
        tokens = tuple(t for event in events for t in event.tokens)
        text = ""
        if self.model.has_tokenizer:
            detokenizer = Detokenizer(self.model.tokenizer)
            text = detokenizer.push(tokens) + detokenizer.flush()
        logprobs = tuple(entry for event in events for entry in event.logprobs)
        return Generation(tokens, text, events[-1].finish or "error", logprobs)
