"""The whole engine on tiny models: company, cancels, replay and reuse change no token."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from sparkjax import compiles
from sparkjax.engine.engine import Engine
from sparkjax.engine.journal import Decoder, encode
from sparkjax.engine.limits import DoesNotFit, make_limits
from sparkjax.engine.records import Sampling, Submit, Tick
from sparkjax.model import Model

GOLDEN = Path(__file__).parent.parent / "golden"
LIMITS = {"slots": 6, "context": 1664, "page_size": 16, "tiles": (16, 64)}


@pytest.fixture(scope="module", params=[pytest.param("llama", marks=pytest.mark.slow), "gemma3"])
def model(request) -> Model:
    return Model.load(GOLDEN / request.param)


@pytest.fixture(scope="module")
def engine(model: Model) -> Engine:
    engine = Engine(model, make_limits(model, kv_tokens=6 * 512, queue=200, **LIMITS))
    engine.runner.warm()
    compiles.count()
    return engine


def random_submit(rng: random.Random, id: int, vocab: int, longest: int = 1500) -> Submit:
    length = min(longest, int(rng.expovariate(1 / 120)) + 1) if rng.random() < 0.9 else longest
    sampling = Sampling(
        temperature=rng.choice([0.0, 0.0, 0.7, 1.3]),
        top_k=rng.choice([0, 5, 40]),
        top_p=rng.choice([1.0, 0.9]),
        min_p=rng.choice([0.0, 0.05]),
        presence_penalty=rng.choice([0.0, 0.5]),
        frequency_penalty=rng.choice([0.0, 0.3]),
        repetition_penalty=rng.choice([1.0, 1.2]),
        seed=rng.getrandbits(64),
        logit_bias=((rng.randrange(vocab), 2.0),) if rng.random() < 0.2 else (),
        logprobs=rng.choice([None, 0, 5]),
    )
    return Submit(
        id,
        tuple(rng.randrange(vocab) for _ in range(length)),
        rng.randint(1, 40),
        sampling,
        stop_ids=tuple(rng.sample(range(vocab), 3)) if rng.random() < 0.5 else (),
        prompt_logprobs=rng.choice([None, None, None, 3]),
    )


def collect(found: dict[int, dict], events) -> None:
    for event in events:
        entry = found.setdefault(
            event.id, {"tokens": [], "logprobs": [], "prompt": (), "finish": None}
        )
        assert entry["finish"] is None, "an event after the last one"
        entry["tokens"] += event.tokens
        entry["logprobs"] += event.logprobs
        entry["prompt"] = event.prompt_logprobs or entry["prompt"]
        entry["finish"] = event.finish


def alone(engine: Engine, submit: Submit) -> dict:
    """The same request with nothing else in the engine."""

    own = msgspec.structs.replace(submit, id=engine.new_id())
    found: dict[int, dict] = {}
    collect(found, engine.tick((own,)))
    while not engine.idle:
        collect(found, engine.tick())
    return found[own.id]


def run_waves(engine: Engine, rng: random.Random, count: int, cancel: float) -> tuple[dict, dict]:
    """Submits `count` requests in waves with cancels at random moments, to the end."""
    vocab = engine.model.config.vocab
    waiting = [random_submit(rng, engine.new_id(), vocab) for _ in range(count)]
    submits = {s.id: s for s in waiting}
    found: dict[int, dict] = {}
    while waiting or not engine.idle:
        wave = tuple(
            waiting.pop(0) for _ in range(min(len(waiting), rng.choice([0, 0, 0, 1, 2, 7])))
        )
        running = [
            i
            for i in submits
            if i not in {w.id for w in waiting} and not found.get(i, {}).get("finish")
        ]
        cancels = tuple(i for i in running if rng.random() < cancel)
        collect(found, engine.tick(wave, cancels))
        engine.scheduler.check()
    return submits, found


def test_company_and_cancels_change_no_token(engine: Engine):
    rng = random.Random(7)
    with compiles.forbidden():
        submits, found = run_waves(engine, rng, 100, cancel=0.004)
        assert set(found) == set(submits)
        finished = [i for i in submits if found[i]["finish"] in ("stop", "length")]
        assert 40 < len(finished) < 100, "the schedule should finish most and cancel some"
        for id in finished:
            assert alone(engine, submits[id]) == found[id]
    gauges = engine.scheduler.gauges()
    assert (gauges.pages, gauges.running, gauges.waiting) == (0, 0, 0)


def test_a_recorded_run_replays_to_the_same_digests_and_tokens(model: Model):
    limits = make_limits(model, kv_tokens=6 * 512, **LIMITS)
    recorded: list[bytes] = []
    digests: list[int] = []
    first = Engine(model, limits, record=lambda tick: recorded.append(encode(tick)))
    rng = random.Random(11)
    waiting = [random_submit(rng, first.new_id(), model.config.vocab, 200) for _ in range(12)]
    events = []
    while waiting or not first.idle:
        wave = tuple(waiting.pop(0) for _ in range(min(len(waiting), 3)))
        events.append(first.tick(wave, tuple(s.id for s in wave if rng.random() < 0.2)))
        digests.append(first.scheduler.digest)

    second = Engine(model, limits)
    decoder = Decoder()
    ticks = [tick for part in recorded for tick in decoder.feed(part)]
    assert len(ticks) == len(events)
    for tick, expected, digest in zip(ticks, events, digests, strict=True):
        assert isinstance(tick, Tick)
        assert second.step(tick) == expected
        assert second.scheduler.digest == digest


def test_a_cancelled_request_is_gone_within_two_ticks(engine: Engine):
    vocab = engine.model.config.vocab
    for ticks_before in (0, 1, 2, 5, 30):
        long = Submit(engine.new_id(), tuple(i % vocab for i in range(1000)), 64)
        engine.tick((long,))
        for _ in range(ticks_before):
            engine.tick()
        found: dict[int, dict] = {}
        collect(found, engine.tick(cancels=(long.id,)))
        collect(found, engine.tick())
        assert found[long.id]["finish"] == "cancelled"
        assert engine.scheduler.gauges().pages == 0
        while not engine.idle:
            engine.tick()


def test_prompts_of_every_length_around_tile_and_page_edges(engine: Engine):
    vocab = engine.model.config.vocab
    rng = random.Random(3)
    stream = [rng.randrange(vocab) for _ in range(200)]
    submits = [
        Submit(engine.new_id(), tuple(stream[:n]), 3)
        for edge in (16, 32, 64, 80, 128)
        for n in (edge - 1, edge, edge + 1)
    ]
    found: dict[int, dict] = {}
    collect(found, engine.tick(tuple(submits)))
    while not engine.idle:
        collect(found, engine.tick())
    for submit in submits:
        expected = engine.model.greedy(submit.tokens, 3, tile=64).tolist()
        assert found[submit.id]["tokens"] == expected


def test_prompt_logprobs_do_not_depend_on_tiles_and_equal_the_librarys(engine: Engine):
    vocab = engine.model.config.vocab
    rng = random.Random(5)
    tokens = tuple(rng.randrange(vocab) for _ in range(150))
    out = alone(engine, Submit(0, tokens, 0, prompt_logprobs=2))
    assert out["tokens"] == [] and out["finish"] == "length"
    got = [entry.logprob for entry in out["prompt"]]
    expected = engine.model.score(tokens)
    assert len(got) == len(expected) == 149
    assert max(abs(a - b) for a, b in zip(got, expected.tolist(), strict=True)) < 1e-4
    assert [entry.token for entry in out["prompt"]] == list(tokens[1:])


def test_more_caches_than_memory_are_refused_with_what_would_fit(model: Model):
    with pytest.raises(DoesNotFit, match=r"largest engine\.kv_tokens that fits is \d+"):
        make_limits(model, slots=2, kv_tokens=1 << 20, room=1 << 22)
