"""Answers end before their tokens do, over the words of a real vocabulary."""

from __future__ import annotations

import json
import random

import jsonschema
import numpy as np
import pytest
import schemas

from sparkjax.model import Model
from sparkjax.structured import bits
from sparkjax.structured.grammars import Grammars
from sparkjax.structured.search import Effort, Search
from sparkjax.structured.sources import Wanted, source


@pytest.fixture(scope="module")
def grammars(smollm2_path) -> Grammars:
    words = Model.load(smollm2_path).tokenizer
    return Grammars.of(words, len(words.vocabulary.tokens), sorted(words.eos_ids))


def babble(grammars: Grammars, grammar: str, tokens: int, rng: random.Random) -> bytes | None:
    """A random answer that opens what it can; None where its tokens ran out."""
    alphabet = grammars.alphabet
    matcher = grammars.matcher(grammar, tokens=tokens)
    row = np.zeros((1, len(alphabet.free)), np.uint32)
    found = b""
    opens = rng.random() < 0.5
    for _ in range(tokens):
        matcher.masks(row)
        assert matcher.error is None, matcher.error
        allowed = bits.ids(row[0]).tolist()
        wishes = [t for t in allowed if t not in alphabet.ends]
        if opens and len(allowed) < 3000 and rng.random() < 0.7:
            wishes = [t for t in wishes if any(c in b"{[," for c in alphabet.tokens[t])] or wishes
        token = rng.choice(wishes or allowed)
        matcher.advance(token)
        if token in alphabet.ends:
            return found
        found += alphabet.tokens[token]
    return None


@pytest.mark.parametrize(
    "seed", [pytest.param(i, marks=pytest.mark.slow if i > 3 else ()) for i in range(100)]
)
def test_every_answer_of_words_ends_and_is_valid(grammars: Grammars, seed: int):
    schema = schemas.harder(seed) if seed % 4 else schemas.schema(10_000 + seed)
    grammar = source(Wanted("json_schema", schema, strict=True)).text
    start, shape = grammars.prepare(grammar).result()
    least = Search(grammars.closing, grammar, shape).shortest(start, Effort(10**6))
    assert least is not None
    rng = random.Random(seed)
    for more in (0, 2, 10, 40, 100, 250, 500, 900):
        found = babble(grammars, grammar, len(least.tokens) + 1 + more, rng)
        assert found is not None, more
        jsonschema.Draft202012Validator(schema).validate(json.loads(found))
