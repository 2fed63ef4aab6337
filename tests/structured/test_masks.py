"""Constrained requests in the whole engine, on a tiny model with a byte-level tokenizer."""

from __future__ import annotations

import json
import random
import re

import msgspec
import numpy as np
import pytest
import schemas
from test_generated import check
from test_generated import grammar as strict

from sparkjax import compiles
from sparkjax.engine.engine import Engine
from sparkjax.engine.journal import Decoder, encode
from sparkjax.engine.limits import make_limits
from sparkjax.engine.records import Grammar, Sampling, Submit
from sparkjax.model import Model
from sparkjax.structured.sources import Wanted, source

PEOPLE = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "grün", "bleu"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
}


def schema(value: object) -> Grammar:
    return Grammar(source(Wanted("json_schema", value)).text)


def regex(pattern: str) -> Grammar:
    return Grammar(source(Wanted("regex", pattern)).text)


ANYTHING = Grammar(source(Wanted("lark", "start: ANY\nANY: /(?s:.)*/")).text)


@pytest.fixture(scope="module")
def ends(engine: Engine) -> tuple[int, ...]:
    return engine.runner.grammars().alphabet.ends


def run(engine: Engine, *submits: Submit) -> list[dict]:
    """The answers of requests that run together."""
    own = [msgspec.structs.replace(s, id=engine.new_id()) for s in submits]
    found = {s.id: {"tokens": [], "finish": None, "error": None} for s in own}
    events = engine.tick(tuple(own))
    while True:
        for event in events:
            found[event.id]["tokens"] += event.tokens
            found[event.id]["finish"] = event.finish
            found[event.id]["error"] = event.error
        if engine.idle:
            break
        events = engine.tick()
    assert len(engine.runner.masks) == 0, "grammars are kept for nobody"
    return [found[s.id] for s in own]


def text(engine: Engine, answer: dict) -> str:
    ends = engine.runner.grammars().alphabet.ends
    return engine.model.tokenizer.decode([t for t in answer["tokens"] if t not in ends])


def request(ends, grammar: Grammar | None, seed: int = 0, most: int = 200, **sampling) -> Submit:
    rng = random.Random(seed)
    prompt = tuple(rng.randrange(256) for _ in range(rng.randint(1, 40)))
    chosen = Sampling(**{"temperature": 1.0, "seed": seed, **sampling})
    return Submit(0, prompt, most, chosen, ends, grammar=grammar)


def test_a_random_model_writes_what_the_schema_says(engine: Engine, ends):
    with compiles.forbidden():
        answers = run(engine, *(request(ends, schema(PEOPLE), seed) for seed in range(8)))
    for answer in answers:
        assert answer["finish"] == "stop"
        person = json.loads(text(engine, answer))
        assert list(person) == ["name", "age", "tags"] and 0 <= person["age"] <= 120
        assert len(person["name"]) <= 12 and len(person["tags"]) <= 3
    assert len({text(engine, a) for a in answers}) == 8


def test_generated_schemas(engine: Engine, ends):
    made = [schemas.schema(seed) for seed in range(10)]
    with compiles.forbidden():
        answers = run(
            engine, *(request(ends, strict(each), i, most=1900) for i, each in enumerate(made))
        )
    check([(text(engine, a), a["error"] or a["finish"]) for a in answers], made)


def test_alone_and_in_company_are_the_same(engine: Engine, ends):
    """Constrained rows change nothing for others, nor others for them."""
    submits = [
        request(ends, schema(PEOPLE), 1),
        request(ends, None, 2, most=60),
        request(ends, regex("[a-f]{3,40}"), 3, temperature=0.0),
        request((), None, 4, most=60, temperature=0.0),
        request(
            ends,
            schema({"type": "array", "items": {"type": "boolean"}, "minItems": 5, "maxItems": 9}),
            5,
        ),
        request(ends, None, 6, most=25),
    ]
    with compiles.forbidden():
        together = run(engine, *submits)
        assert [run(engine, each)[0] for each in submits] == together
        assert run(engine, *submits) == together, "the seed decides"


def test_a_grammar_that_allows_the_free_path_changes_no_token(engine: Engine, ends):
    """Greedy tokens as long as they are valid text; the mask forbids only control tokens."""
    tokenizer = engine.model.tokenizer
    silent = sorted(tokenizer.vocabulary.control)
    bias = tuple((t, -100.0) for t in silent)
    ascii_only = tuple(
        (t, -100.0) for t in range(384) if any(b > 127 for b in tokenizer.token_bytes(t))
    )
    sampling = {
        "temperature": 0.0,
        "logit_bias": tuple(sorted({**dict(bias), **dict(ascii_only)}.items())),
    }
    for seed in range(3):
        free = request((), None, seed, most=50, **sampling)
        bound = msgspec.structs.replace(free, grammar=ANYTHING)
        assert run(engine, bound)[0]["tokens"] == run(engine, free)[0]["tokens"]


def test_a_cut_answer_is_the_beginning_of_a_valid_one(engine: Engine, ends):
    whole = run(engine, request(ends, schema(PEOPLE), 7))[0]
    for most in (1, 2, 5, 17):
        cut = run(engine, request(ends, schema(PEOPLE), 7, most=most))[0]
        assert cut["finish"] == "length" and cut["tokens"] == whole["tokens"][:most]
        matcher = engine.runner.grammars().matcher(schema(PEOPLE).source)
        for token in cut["tokens"]:
            matcher.advance(token)
        assert matcher.error is None and not matcher.complete


def test_the_end_is_forced_and_only_allowed_at_the_end(engine: Engine, ends):
    """A strong wish for the end cannot cut an answer short, a strong dislike cannot prolong it."""
    wish = {"logit_bias": tuple((e, 100.0) for e in ends), "temperature": 0.0}
    dislike = {"logit_bias": tuple((e, -100.0) for e in ends), "temperature": 0.0}
    early, late = run(
        engine,
        request(ends, regex("(ab){4,9}"), 1, **wish),
        request(ends, regex("(ab){4,9}"), 1, **dislike),
    )
    assert text(engine, early) == "ab" * 4 and text(engine, late) == "ab" * 9
    assert early["finish"] == late["finish"] == "stop"


def test_free_text_comes_first_where_reasoning_does(engine: Engine, ends):
    grammar = Grammar(regex("[a-f]{3}").source, after="0")
    tokens = engine.runner.grammars().alphabet.tokens
    inside = tuple((i, -100.0) for i, raw in enumerate(tokens) if b"0" in raw[:-1])
    wish = (*inside, *((e, 100.0) for e in ends))
    seen = 0
    for seed in range(4):
        answer = run(engine, request(ends, grammar, seed, most=300, logit_bias=wish))[0]
        if answer["finish"] == "stop":  # the end was wished for, but not allowed before
            seen += 1
            assert re.fullmatch("[^0]*0\n{0,8}[a-f]{3}", text(engine, answer))
    assert seen


def test_a_request_whose_grammar_cannot_go_on_fails_alone(engine: Engine, ends):
    """T28: beyond the counted limits in the middle of an answer."""
    rules = 'start: "y" r0\n' + "\n".join(f"r{i}: r{i + 1} | r{i + 1} r{i + 1}" for i in range(400))
    bad = Grammar(source(Wanted("lark", rules + '\nr400: "x"')).text)
    none = Grammar("start: nothing")
    good = request(ends, schema(PEOPLE), 3)
    answers = run(engine, good, request(ends, bad, 1), request(ends, none, 2))
    assert answers[0] == run(engine, good)[0]
    for answer in answers[1:]:
        assert answer["finish"] == "error" and answer["error"]
    assert text(engine, answers[1]).startswith("y") and answers[2]["tokens"] == []


def test_cancels_free_grammars(engine: Engine, ends):
    rng = random.Random(5)
    for ticks in (0, 1, 2, 3, 7):
        submits = [
            msgspec.structs.replace(request(ends, schema(PEOPLE), i), id=engine.new_id())
            for i in range(6)
        ]
        engine.tick(tuple(submits))
        for _ in range(ticks):
            engine.tick()
        gone = rng.sample([s.id for s in submits], 3)
        engine.tick(cancels=tuple(gone))
        while not engine.idle:
            engine.tick()
        assert len(engine.runner.masks) == 0
        assert engine.scheduler.gauges().pages == 0


def test_a_recorded_run_replays_on_another_rank(model: Model, engine: Engine, ends):
    """T33's first half: the automata follow the committed tokens, on every rank alike."""
    limits = make_limits(model, slots=4, context=2048, tiles=(16,), page_size=16)
    recorded: list[bytes] = []
    first = Engine(model, limits, record=lambda tick: recorded.append(encode(tick)))
    first.runner.programs = engine.runner.programs  # compiled already
    submits = [request(ends, schema(PEOPLE) if i % 2 else None, i, most=60) for i in range(6)]
    submits = [msgspec.structs.replace(s, id=first.new_id()) for s in submits]
    events = [first.tick(tuple(submits[:4]))]
    events.append(first.tick(tuple(submits[4:]), cancels=(submits[1].id,)))
    while not first.idle:
        events.append(first.tick())
    second, decoder = Engine(model, limits), Decoder()
    second.runner.programs = engine.runner.programs
    ticks = [tick for part in recorded for tick in decoder.feed(part)]
    assert [second.step(tick) for tick in ticks] == events
    assert second.scheduler.digest == first.scheduler.digest


def test_masks_are_exactly_what_the_grammar_allows(engine: Engine):
    """Against trying every token, along random walks."""
    grammars = engine.runner.grammars()
    rng = np.random.default_rng(0)
    for wanted in (
        Wanted("json_schema", PEOPLE),
        Wanted("regex", "(é|[0-9]{2}|\n)+x"),
        Wanted("json_object"),
    ):
        text = source(wanted).text
        matcher = grammars.matcher(text)
        walked: list[int] = []
        for _ in range(25):
            row = np.zeros((1, len(grammars.alphabet.free)), np.uint32)
            matcher.masks(row)
            allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
            tried = []
            for token in range(384):
                other = grammars.matcher(text)
                for each in [*walked, token]:
                    other.advance(each)
                if other.error is None:
                    tried.append(token)
            assert allowed.tolist() == tried
            if matcher.complete:
                break
            walked.append(int(rng.choice([t for t in tried if t not in grammars.alphabet.ends])))
            matcher.advance(walked[-1])
