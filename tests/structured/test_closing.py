"""Answers end before their tokens do."""

from __future__ import annotations

import json
import random

import jsonschema
import pytest
import schemas
from test_tools import OFFERED, check, parse
from walks import END, GRAMMARS, TAGS, TOKENS, allowed, answer, text

from sparkjax.structured import tools
from sparkjax.structured.budget import HORIZON
from sparkjax.structured.calls import Calls
from sparkjax.structured.closing import Closing
from sparkjax.structured.search import Effort, Search
from sparkjax.structured.sources import Wanted, source

CLOSING = Closing(GRAMMARS.alphabet.tokens, [*TAGS.values()], [END])
OPEN = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "number": {"type": "number"},
        "any": {},
        "more": {"type": "array", "items": {"$ref": "#"}},
        "deep": {"type": "object", "properties": {"name": {"type": "string"}, "kind": {"enum": ["[1]", "x"]}}, "required": ["name", "kind"]},
    },
    "required": ["text", "any"],
}  # fmt: skip


def babble(grammar: str, tokens: int, rng: random.Random) -> list[int]:
    """A random answer within a budget, as a model would write that never wishes to end."""
    matcher = GRAMMARS.matcher(grammar, tokens=tokens)
    found: list[int] = []
    while len(found) < tokens:
        options = allowed(matcher)
        wishes = [t for t in options if t != END and t not in TAGS.values()]
        token = rng.choice(wishes or options)
        matcher.advance(token)
        assert matcher.error is None
        if token == END:
            return found
        found.append(token)
    return [*found, -1]


def least(grammar: str) -> int:
    """Tokens of the shortest answer that is found, and its end."""
    start, shape = GRAMMARS.prepare(grammar).result()
    found = Search(CLOSING, grammar, shape).shortest(start, Effort(10**6))
    assert found is not None
    return len(found.tokens) + 1


@pytest.mark.parametrize(
    "seed", [pytest.param(i, marks=pytest.mark.slow if i > 29 else ()) for i in range(200)]
)
def test_every_answer_ends_and_is_valid_however_few_tokens_it_has(seed: int):
    """From the shortest answer's tokens on."""
    schema = OPEN if seed % 4 == 0 else schemas.schema(seed)
    grammar = source(Wanted("json_schema", schema, strict=True)).text
    rng = random.Random(seed)
    for more in (0, 1, 5, 30, 80, 400):
        found = babble(grammar, least(grammar) + more, rng)
        assert found[-1] != -1, text(found[:-1])
        jsonschema.Draft202012Validator(schema).validate(json.loads(text(found)))


@pytest.mark.parametrize("optional", [True, False], ids=["property", "items"])
def test_a_large_record_is_not_begun_where_it_could_not_be_ended(optional: bool):
    short = {"type": "string", "maxLength": 3}
    record = {
        "type": "object",
        "properties": {f"name {i}": short for i in range(40)},
        "required": [f"name {i}" for i in range(40)],
    }
    part = record if optional else {"type": "array", "items": record}
    schema = {
        "type": "object",
        "properties": {"text": short, "part": part, "more": {"type": "array", "items": part}},
        "required": ["text"] if optional else ["text", "part"],
    }
    grammar = source(Wanted("json_schema", schema, strict=True)).text
    for seed, more in enumerate((300, 500, 700, 1000, 1300, 2000)):
        found = babble(grammar, least(grammar) + more, random.Random(seed))
        assert found[-1] != -1, text(found[:-1])
        jsonschema.Draft202012Validator(schema).validate(json.loads(text(found)))


@pytest.mark.parametrize("control", [True, False], ids=["control tokens", "text"])
@pytest.mark.parametrize("name", sorted({*tools.WRITERS} - {"harmony"}))
def test_calls_that_have_to_come_end_with_all_of_their_arguments(name: str, control: bool):
    calls = Calls(name, OFFERED, parallel=False, tags=TAGS if control else {})
    grammar, _ = tools.grammar(calls)
    rng = random.Random(1)
    for more in (5, 60, 300):
        found = babble(grammar, least(grammar) + more, rng)
        assert found[-1] != -1, text(found[:-1])
        (call,) = parse(name, found, control).tool_calls
        check(call)


@pytest.mark.parametrize("seed", range(20))
def test_an_answer_that_fits_may_be_given(seed: int):
    """Nothing of a whole answer is refused where there are two dozen tokens more than it takes."""
    schema = OPEN if seed % 4 == 0 else schemas.schema(seed)
    grammar = source(Wanted("json_schema", schema, strict=True)).text
    written = answer(grammar, seed)
    for more in (24, 60, 150):
        matcher = GRAMMARS.matcher(grammar, tokens=len(written) + 1 + more)
        for at, token in enumerate(written):
            assert token in allowed(matcher), (more, text(written[:at]), TOKENS[token])
            matcher.advance(token)
        assert END in allowed(matcher)


@pytest.mark.parametrize(
    "wanted",
    [
        Wanted("json_schema", {"enum": ["<[99999999999999]>", "x"]}),
        Wanted("json_schema", {"type": "object", "properties": {"a": {"type": "string"}, "b": {"enum": ["<[999999]>"]}}, "required": ["a", "b"]}),
        Wanted("json_schema", {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "string", "pattern": "^[a-f]{30}$"}}, "required": ["a", "b"]}),
        *(
            Wanted("lark", f'// {text}\nstart: "{{" /[a-z]*/ "}}"')
            for text in (r'suffix="\x41"', r'suffix="\ud800"', r"/(?s:.*)\x{d800}/", r"/(?s:.*)\x{zz}/", r"/(?s:.*)\x{ffffffffff}/")
        ),
    ],
)  # fmt: skip
def test_what_looks_like_an_end_in_a_client_s_text_is_none(wanted: Wanted):
    grammar = source(wanted).text
    for seed in range(3):
        found = babble(grammar, least(grammar) + 20, random.Random(seed))
        assert found[-1] != -1, text(found[:-1])


def test_too_few_tokens_change_nothing():
    grammar = source(Wanted("json_schema", OPEN)).text
    cut, free = GRAMMARS.matcher(grammar, tokens=least(grammar) - 1), GRAMMARS.matcher(grammar)
    for token in b'{"text":"hello':
        assert allowed(cut) == allowed(free)
        cut.advance(token)
        free.advance(token)


def test_nothing_is_narrowed_before_the_end_is_near():
    grammar = source(Wanted("json_schema", OPEN)).text
    far, free = GRAMMARS.matcher(grammar, tokens=HORIZON * 3), GRAMMARS.matcher(grammar)
    for token in b'{"text":"' + b"x" * (HORIZON * 2 - 10):
        assert allowed(far) == allowed(free)
        far.advance(token)
        free.advance(token)


@pytest.mark.parametrize(
    "wanted",
    [Wanted("lark", "start: /(?s:.)*/"), Wanted("regex", "[a-z,\\[]+"), Wanted("choice", ["[a]", "b", "{c}"])],
)  # fmt: skip
def test_what_may_end_anywhere_or_fits_is_not_narrowed(wanted: Wanted):
    rng = random.Random(1)
    grammar = source(wanted).text
    bound, free = GRAMMARS.matcher(grammar, tokens=12), GRAMMARS.matcher(grammar)
    for _ in range(12):
        assert allowed(bound) == allowed(free)
        token = rng.choice(allowed(free))
        if token == END:
            return
        bound.advance(token)
        free.advance(token)
