"""Generated schemas: whatever a model would like to say, what it says is valid. `test_masks` has
some with a tiny model."""

from __future__ import annotations

import json

import pytest
import schemas

from sparkjax.engine.engine import Engine
from sparkjax.engine.limits import make_limits
from sparkjax.engine.records import Grammar, Sampling, Submit
from sparkjax.model import Model
from sparkjax.structured.sources import Wanted, source

jsonschema = pytest.importorskip("jsonschema")


def grammar(schema: dict) -> Grammar:
    return Grammar(source(Wanted("json_schema", schema, strict=True)).text)


def answers(
    engine: Engine, prompts: list[tuple[int, ...]], made: list[dict], most: int
) -> list[tuple[str, str]]:
    """(text, why it ended) at temperature 1, all requests at once."""
    tokenizer = engine.model.tokenizer
    ends = engine.runner.grammars().alphabet.ends
    submits = [
        Submit(
            engine.new_id(),
            prompt,
            most,
            Sampling(temperature=1.0, seed=i),
            ends,
            grammar=grammar(schema),
        )
        for i, (prompt, schema) in enumerate(zip(prompts, made, strict=True))
    ]
    found: dict[int, tuple[list[int], str]] = {s.id: ([], "") for s in submits}
    events = engine.tick(tuple(submits))
    while True:
        for event in events:
            tokens = found[event.id][0]
            tokens += [t for t in event.tokens if t not in ends]
            found[event.id] = tokens, event.error or event.finish or ""
        if engine.idle:
            break
        events = engine.tick()
    return [(tokenizer.decode(found[s.id][0]), found[s.id][1]) for s in submits]


def check(found: list[tuple[str, str]], made: list[dict]) -> None:
    for i, ((written, why), schema) in enumerate(zip(found, made, strict=True)):
        assert why == "stop", (i, why, written[-200:])
        jsonschema.Draft202012Validator(schema).validate(json.loads(written))


@pytest.mark.slow
def test_smollm2_writes_valid_json_for_200_schemas(smollm2_path):
    model = Model.load(smollm2_path)
    engine = Engine(model, make_limits(model, slots=8, context=2048, queue=400))
    engine.runner.warm()
    made = [schemas.schema(seed) for seed in range(200)]
    prompts = [
        tuple(
            model.tokenizer.encode_rendered(
                "<|im_start|>user\nWrite JSON for this schema: "
                + model.tokenizer.shield(json.dumps(schema)[:600])
                + "<|im_end|>\n<|im_start|>assistant\n"
            )
        )
        for schema in made
    ]
    check(answers(engine, prompts, made, 1200), made)
