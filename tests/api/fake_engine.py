"""An engine without a model: the real scheduler and service thread over scripted tokens."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future

from sparkjax.engine.plan import Event, Output, Row, Tile, TokenLogprob
from sparkjax.engine.records import Grammar, Limits, Submit, Tick
from sparkjax.engine.scheduler import Scheduler
from sparkjax.engine.service import EngineService

from . import toy

LIMITS = Limits(slots=4, pages=160, page_size=16, context=512, queue=8, tiles=(16, 32), rows=(2, 4))
Script = Callable[[Submit], list[int]]


def speak(text: str, *, end: bool = True) -> Script:
    """Every request gets this text."""
    ids = toy.make_tokenizer().encode(text) + ([toy.END] if end else [])
    return lambda submit: ids


def babble(submit: Submit) -> list[int]:
    """A text that depends on the prompt and, when sampled, on the seed; it never ends by itself."""
    seed = submit.sampling.seed if submit.sampling.temperature else 0
    state = hash((submit.tokens, seed)) & 0xFFFFFFFF
    found = []
    for _ in range(submit.max_tokens):
        state = (state * 1664525 + 1013904223) & 0xFFFFFFFF
        found.append(32 + (state >> 16) % 95)
    return found


def logprob(token: int, place: int, count: int) -> TokenLogprob:
    """Something plausible: the token itself is the second of the most likely ones."""
    top = [((token + 1) % len(toy.TOKENS), -0.25), (token, -0.5 - place / 1000)]
    top += [((token + 1 + i) % len(toy.TOKENS), -1.0 - i) for i in range(1, 20)]
    return TokenLogprob(token, -0.5 - place / 1000, tuple(top[:count]))


class FakeCore:
    """Stands where `sparkjax.engine.engine.Engine` stands.

    Attributes:
      script: the tokens of each request.
      burst: tokens that come in one event, as with speculation.
      step_seconds: how long a tick takes.
      running: cleared, the next tick hangs.
      crash: raised by the next tick.
    """

    def __init__(self, limits: Limits = LIMITS, script: Script = babble):
        self.limits, self.scheduler = limits, Scheduler(limits)
        self.script, self.burst, self.step_seconds = script, 1, 0.0
        self.running = threading.Event()
        self.running.set()
        self.crash: Exception | None = None
        self.started: list[int] = []
        self._number = self._id = 0
        self._held: dict[int, list[Event]] = {}

    def new_id(self) -> int:
        self._id += 1
        return self._id

    def prepare(self, grammar: Grammar) -> Future[None]:
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @property
    def idle(self) -> bool:
        return self.scheduler.idle

    def tick(self, submits=(), cancels=(), stops=()) -> list[Event]:
        self.running.wait()
        if self.crash is not None:
            raise self.crash
        if self.step_seconds:
            time.sleep(self.step_seconds)
        tick = Tick(
            self._number, tuple(submits), tuple(cancels), tuple(stops), self.scheduler.digest
        )
        self._number += 1
        plan = self.plan = self.scheduler.schedule(tick)
        outputs = [self._output(item) for item in plan.work]
        return self._grouped(self.scheduler.commit(plan.number, outputs))

    def _output(self, item: Tile | Row) -> Output:
        request = item.request
        if isinstance(item, Row):
            return self._token(item, item.step, ())
        if item.start == 0:
            self.started.append(request.id)
        prompt: tuple[TokenLogprob, ...] = ()
        if request.prompt_logprobs is not None:
            places = range(item.start + 1, min(item.start + item.length + 1, len(request.tokens)))
            prompt = tuple(logprob(request.tokens[p], p, request.prompt_logprobs) for p in places)
        if not item.last or not request.max_tokens:
            return Output(item.slot, None, None, prompt)
        return self._token(item, 0, prompt)

    def _token(self, item: Tile | Row, step: int, prompt: tuple[TokenLogprob, ...]) -> Output:
        script = self.script(item.request)
        token = script[step] if step < len(script) else toy.END
        return Output(
            item.slot, token, logprob(token, step, item.request.sampling.logprobs or 0), prompt
        )

    def _grouped(self, events: list[Event]) -> list[Event]:
        out = []
        for event in events:
            held = self._held.setdefault(event.id, [])
            held.append(event)
            if event.finish is not None or sum(len(e.tokens) for e in held) >= self.burst:
                del self._held[event.id]
                out.append(
                    Event(
                        event.id,
                        tokens=sum((e.tokens for e in held), ()),
                        logprobs=sum((e.logprobs for e in held), ()),
                        prompt_logprobs=sum((e.prompt_logprobs for e in held), ()),
                        finish=event.finish,
                        error=event.error,
                    )
                )
        return out


class FakeEngine(EngineService):
    """The real service over a FakeCore, counting what the API asks of it."""

    def __init__(self, limits: Limits = LIMITS, script: Script = babble):
        self.core = FakeCore(limits, script)
        super().__init__(self.core)  # type: ignore[arg-type]
        self.calls: Counter[str] = Counter()
        self.submitted: list[Submit] = []
        self.ended: dict[int, str] = {}

    def submit(
        self, tokens, sampling, max_tokens, stop_ids, prompt_logprobs, on_events, grammar=None
    ) -> int:
        self.calls["submit"] += 1

        def watched(event: Event) -> None:
            if event.finish is not None:
                self.ended[event.id] = event.finish
            on_events(event)

        id = super().submit(
            tokens, sampling, max_tokens, stop_ids, prompt_logprobs, watched, grammar
        )
        self.submitted.append(
            Submit(id, tokens, max_tokens, sampling, stop_ids, prompt_logprobs, grammar)
        )
        return id

    def cancel(self, id: int) -> None:
        self.calls["cancel"] += 1
        super().cancel(id)

    def stop(self, id: int) -> None:
        self.calls["stop"] += 1
        super().stop(id)

    def wait_idle(self, seconds: float = 3.0) -> None:
        """Raises unless everything is free within this time."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            now = self.gauges()
            if not (now.running or now.waiting or now.pages or self.open_requests):
                return
            time.sleep(0.005)
        raise AssertionError(f"not idle: {self.gauges()}, {self.open_requests} open")
