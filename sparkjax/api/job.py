"""One HTTP request inside the engine: its choices, from submission to the last piece."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from sparkjax.engine.plan import Event
from sparkjax.engine.records import Grammar, Submit
from sparkjax.engine.service import EngineStopped, QueueFull
from sparkjax.text.parsing import Machine

from . import errors
from .answer import Answer, Piece
from .errors import ApiError
from .front import Front
from .options import Options
from .prompts import Prompt, refused
from .wire import Usage


@dataclasses.dataclass(frozen=True)
class Work:
    """What a request asks of the engine.

    Attributes:
      prompt_field: what the endpoint calls its prompt.
      continues: the text goes on from the prompt's (a completion), not from nothing (a turn).
      prompt_logprobs, grammar: see `Submit`; the grammar is prepared (see `structured`).
      parser: of choice i's answer; None: all its text is content.
      one_call: the first complete call ends an answer.
      budget: the most tokens of reasoning; `close` are the tokens that end it then.
    """

    prompts: tuple[Prompt, ...]
    options: Options
    prompt_field: str
    continues: bool
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    parser: Callable[[int], Machine] | None = None
    one_call: bool = False
    budget: int | None = None
    close: tuple[int, ...] = ()


@dataclasses.dataclass(eq=False)
class _Choice:
    index: int
    prompt: Prompt
    answer: Answer
    submit: Submit
    number: int
    id: int = -1
    first: float | None = None
    admitted: float | None = None
    last: float = 0.0
    closed: bool = False


class Job:
    """Lives on the event loop.

    Args:
      arrived: `time.monotonic()` of the request.
    """

    def __init__(self, front: Front, work: Work, arrived: float):
        self._front, self._engine, self._work = front, front.engine, work
        self.arrived = arrived
        self._choices: list[_Choice] = []
        self._pieces: list[tuple[int, Piece]] = []
        self._wake = asyncio.Event()
        self._open = 0
        self._error: ApiError | None = None

    # --- Beginning ------------------------------------------------------------------------------

    def start(self) -> None:
        """Submits all choices, or none.

        Raises:
          ApiError: they can never be served (400), or not now (503).
        """
        options, limits = self._work.options, self._engine.limits
        total = len(self._work.prompts) * options.n
        if total > limits.slots + limits.queue:
            name = "n" if options.n > 1 else self._work.prompt_field
            raise errors.invalid(
                name, f"asks for {total} answers; allowed: {limits.slots + limits.queue} at a time"
            )
        submits = [self._submit_of(prompt) for prompt in self._work.prompts]
        for submit in submits:
            reason = self._engine.refusal(submit)
            if reason is not None:
                raise refused(reason, self._work.prompt_field)
        self._front.bridge.bind()
        try:
            for prompt, submit in zip(self._work.prompts, submits, strict=True):
                for i in range(options.n):
                    self._start_choice(prompt, submit, i)
        except QueueFull as full:
            self.cancel()
            raise errors.overloaded(f"overloaded: {full}", self._front.patience()) from None
        except EngineStopped as stopped:
            self.cancel()
            raise self._front.stopped(str(stopped)) from None
        self._front.jobs.add(self)
        self._observe_start(submits)

    def _submit_of(self, prompt: Prompt) -> Submit:
        options = self._work.options
        most = options.max_tokens
        if most is None:
            most = max(self._front.longest - len(prompt.tokens), 1)
            if self._front.served.default_max_tokens is not None:
                most = min(most, self._front.served.default_max_tokens)
        work = self._work
        return Submit(
            0,
            prompt.tokens,
            most,
            options.sampling,
            options.stop_ids,
            work.prompt_logprobs,
            work.grammar,
        )

    def _start_choice(self, prompt: Prompt, submit: Submit, number: int) -> None:
        options = self._work.options
        before = prompt.tokens if self._work.continues else ()
        tokenizer = self._front.served.tokenizer
        index = len(self._choices)
        answer = Answer(
            tokenizer,
            options.stops,
            options.stop_ids,
            before,
            self._work.parser(index) if self._work.parser is not None else None,
            self._work.one_call,
            self._work.budget,
        )
        choice = _Choice(index, prompt, answer, submit, number)
        self._submit(choice, submit)
        self._choices.append(choice)
        self._open += 1

    def _submit(self, choice: _Choice, submit: Submit) -> None:
        def receive(event: Event) -> None:
            if choice.submit is submit:  # and not one that a later one has replaced
                self._receive(choice, event)

        choice.submit = submit
        choice.id = self._engine.submit(
            submit.tokens,
            self._work.options.sampling_of(choice.number),
            submit.max_tokens,
            submit.stop_ids,
            submit.prompt_logprobs,
            self._front.bridge.to(receive),
            submit.grammar,
        )

    def _end_reasoning(self, choice: _Choice) -> Piece | None:
        """The budget of reasoning is spent: the answer goes on behind a closing tag, as a new
        request to the engine over all tokens so far."""
        answer, first, work = choice.answer, choice.submit, self._work
        self._engine.stop(choice.id)
        tokens = (*choice.prompt.tokens, *answer.generated, *work.close)
        most = min(first.max_tokens - answer.tokens, self._front.longest - len(tokens))
        if most < 1:
            return answer.cut()
        grammar = first.grammar and Grammar(first.grammar.source)
        answer.inject(work.close)
        try:
            self._submit(
                choice, Submit(0, tokens, most, first.sampling, first.stop_ids, None, grammar)
            )
        except QueueFull as full:
            self._error = errors.overloaded(f"overloaded: {full}", self._front.patience())
            self.cancel()
        except (EngineStopped, ValueError) as stopped:
            self._error = self._front.stopped(str(stopped))
            self.cancel()
        return None

    # --- Running --------------------------------------------------------------------------------

    def _receive(self, choice: _Choice, event: Event) -> None:
        """An event of a choice, on the loop. The engine learns of a stop string here, whether or
        not the client is ready to read."""
        if choice.closed:
            return
        now, answer = time.monotonic(), choice.answer
        before = answer.tokens
        piece = answer.push(event)
        self._observe(choice, event, answer.tokens - before, now)
        pieces = [piece, self._end_reasoning(choice) if answer.over_budget else None]
        if answer.finish is not None:
            if event.finish is None:
                self._engine.stop(choice.id)
            self._close(choice, answer.finish)
        if answer.error is not None and self._error is None:
            self._error = self._failure(answer.error)
            self.cancel()
        self._pieces += [(choice.index, each) for each in pieces if each is not None]
        self._wake.set()

    def _failure(self, reason: str) -> ApiError:
        """The error of an answer that cannot go on: its grammar's, as long as the engine lives."""
        constraint = self._work.options.constraint
        if constraint is not None and self._engine.state == "ready":
            return errors.invalid(constraint.param, reason, "invalid_grammar")
        return self._front.stopped(reason)

    def _close(self, choice: _Choice, reason: str) -> None:
        choice.closed = True
        self._open -= 1
        self._front.metrics.ended(reason)
        if choice.first is not None:
            metrics = self._front.metrics
            metrics.observe("e2e_request_latency_seconds", choice.last - self.arrived)
            metrics.observe("request_decode_time_seconds", choice.last - choice.first)
            if choice.admitted is not None:
                metrics.observe("request_inference_time_seconds", choice.last - choice.admitted)
            metrics.observe("request_generation_tokens", choice.answer.tokens)
            self._front.lasted(choice.last - self.arrived)
        if not self._open:
            self._front.jobs.discard(self)

    def cancel(self) -> None:
        """The client is gone: nothing more is computed for it. Finished choices stay as they are."""
        for choice in self._choices:
            if not choice.closed:
                self._engine.cancel(choice.id)
                self._close(choice, "abort")
        self._front.jobs.discard(self)

    async def pieces(self, silence: float) -> AsyncIterator[list[tuple[int, Piece]]]:
        """(choice, piece) lists as they come, to the end of all choices; an empty list after
        every `silence` seconds without one.

        Raises:
          ApiError: the engine failed; what was committed before was yielded.
        """
        while True:
            batch, self._pieces = self._pieces, []
            if batch:
                yield batch
            elif self._error is not None:
                raise self._error
            elif not self._open:
                return
            else:
                self._wake.clear()
                try:
                    async with asyncio.timeout(silence):
                        await self._wake.wait()
                except TimeoutError:
                    yield []

    # --- Numbers --------------------------------------------------------------------------------

    @property
    def usage(self) -> Usage:
        """Token counts so far."""
        n = self._work.options.n
        return Usage(
            prompt=sum(len(prompt.tokens) for prompt in self._work.prompts),
            completion=sum(choice.answer.tokens for choice in self._choices),
            cached=sum(choice.answer.cached for choice in self._choices[::n]),
            reasoning=sum(choice.answer.reasoning_tokens for choice in self._choices)
            if self._work.parser is not None
            else None,
        )

    @property
    def ended(self) -> bool:
        """Whether no choice goes on."""
        return not self._open

    @property
    def timings(self) -> dict[str, Any]:
        """llama.cpp's `timings` and the time in the queue, in milliseconds. The prompt's rate counts
        what was computed; the answer's leaves out the first token, which came with the prompt."""
        usage = self.usage
        began = [c for c in self._choices if c.first is not None and c.admitted is not None]
        if not began:
            return {}
        admitted = min(c.admitted or 0.0 for c in began)
        first = min(c.first or 0.0 for c in began)
        last = max(c.last for c in began)
        read, written = usage.prompt - usage.cached, usage.completion
        return {
            "queue_ms": _ms(admitted - self.arrived),
            "cache_n": usage.cached,
            **_rate("prompt", read, read, first - admitted),
            **_rate("predicted", written, max(written - len(began), 0), last - first),
        }

    @property
    def first_token_seconds(self) -> float | None:
        """From the request's arrival to the first token of any choice."""
        times = [choice.first for choice in self._choices if choice.first is not None]
        return min(times) - self.arrived if times else None

    @property
    def finish(self) -> str:
        """Why the choices ended, for the log."""
        reasons = (choice.answer.finish or "abort" for choice in self._choices)
        return ",".join(dict.fromkeys(reasons))

    @property
    def text_stop(self) -> str | None:
        """The stop string that ended the first choice."""
        return self._choices[0].answer.text_stop

    def _observe_start(self, submits: list[Submit]) -> None:
        metrics, options = self._front.metrics, self._work.options
        metrics.observe("request_params_n", options.n)
        if options.max_tokens is not None:
            metrics.observe("request_params_max_tokens", options.max_tokens)
        for submit in submits:
            metrics.observe("request_max_num_generation_tokens", submit.max_tokens)

    def _observe(self, choice: _Choice, event: Event, new: int, now: float) -> None:
        metrics = self._front.metrics
        if not new and event.finish not in ("stop", "length"):
            return
        if choice.first is None:
            choice.first = choice.last = now
            size = len(choice.prompt.tokens)
            metrics.observe("time_to_first_token_seconds", now - self.arrived)
            if event.admitted is not None:
                choice.admitted = event.admitted
                metrics.observe("request_queue_time_seconds", event.admitted - self.arrived)
                metrics.observe("request_prefill_time_seconds", now - event.admitted)
            metrics.observe("request_prompt_tokens", size)
            metrics.count("prompt_tokens", size)
            metrics.count("prefix_cache_queries", size)
            metrics.count("prefix_cache_hits", choice.answer.cached)
            self._front.step_tokens += size - choice.answer.cached
        elif new:
            gap = (now - choice.last) / new
            for _ in range(new):
                metrics.observe("inter_token_latency_seconds", gap)
            choice.last = now
        if new:
            metrics.count("generation_tokens", new)
            self._front.step_tokens += new


def _ms(seconds: float) -> float:
    return round(max(seconds, 0.0) * 1000, 3)


def _rate(name: str, tokens: int, timed: int, seconds: float) -> dict[str, Any]:
    rate = {
        f"{name}_per_token_ms": _ms(seconds / timed) if timed else None,
        f"{name}_per_second": round(timed / seconds, 3) if seconds > 0 else None,
    }
    return {f"{name}_n": tokens, f"{name}_ms": _ms(seconds), **rate}
