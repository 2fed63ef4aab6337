"""Who drives the engine: the service's thread, and the caller of a library call."""

from __future__ import annotations

import time
import types
from typing import Any

import pytest

from sparkjax import generate
from sparkjax.engine import service as services
from sparkjax.engine.journal import MAX_FRAME, encode
from sparkjax.engine.plan import Event
from sparkjax.engine.records import Grammar, Sampling, Submit, Tick
from sparkjax.engine.service import EngineService
from tests.api import toy
from tests.api.fake_engine import LIMITS, FakeCore, speak


def test_a_tick_holds_a_bounded_amount_of_new_requests(monkeypatch):
    """A journal's frame has a limit, and one request may ask for many long choices. Who leaves before
    the own turn has come never starts."""
    monkeypatch.setattr(services, "MOST_BYTES", 4000)
    core, ticks, events = FakeCore(), [], []

    def tick(submits: Any = (), cancels: Any = (), stops: Any = ()) -> list[Event]:
        ticks.append([submit.id for submit in submits])
        return FakeCore.tick(core, submits, cancels, stops)

    monkeypatch.setattr(core, "tick", tick)
    core.running.clear()
    service = EngineService(core)  # type: ignore[arg-type]
    service.start()
    service.submit((1,), Sampling(), 1, (), None, events.append)
    while not ticks:
        time.sleep(0.001)
    for _ in range(7):
        service.submit((1,) * 200, Sampling(), 1, (), None, events.append)
    service.cancel(8)
    core.running.set()
    while service.open_requests:
        time.sleep(0.001)
    service.shutdown()
    assert [ids for ids in ticks if ids] == [[1], [2, 3], [4, 5], [6, 7], [8]]
    assert [e.finish for e in sorted(events, key=lambda e: e.id)] == ["length"] * 7 + ["cancelled"]
    assert core.started == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    "request_",
    [Submit(1, (1 << 20,) * (1 << 20), 1), Submit(1, (1,), 1, grammar=Grammar("\u20ac" * (1 << 20)))],
    ids=["tokens", "grammar"],
)
def test_what_a_request_takes_is_not_underestimated(request_):
    size = len(encode(Tick(0, (request_,))))
    assert size <= services._bytes(request_) < MAX_FRAME // 2


def test_a_library_call_that_is_interrupted_leaves_nothing_behind(monkeypatch):
    """Ctrl-c in a notebook, then the next cell."""
    made = []

    def engine(model: Any, limits: Any) -> FakeCore:
        made.append(FakeCore(limits, speak("ab")))
        return made[-1]

    monkeypatch.setattr(generate, "Engine", engine)
    monkeypatch.setattr(generate, "make_limits", lambda model, **sizes: LIMITS)
    model = types.SimpleNamespace(config=types.SimpleNamespace(eos=(toy.END,)), has_tokenizer=False)
    generator = generate.Generator(model)
    wanted = generator.generate([[1, 2]])
    assert generator.generate([[1, 2]]) == wanted and len(made) == 1
    made[0].crash = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        generator.generate([[1, 2]])
    assert generator.generate([[1, 2]]) == wanted and len(made) == 2
