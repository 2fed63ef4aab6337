"""Structured output over HTTP: what is accepted, what is refused and how it is named."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
import types
from concurrent.futures import Future

import pytest

from sparkjax.api import structured
from sparkjax.structured.sources import Source, Wanted
from sparkjax.text.template import ChatTemplate

from . import toy
from .conftest import refused
from .fake_engine import speak
from .pathological import PATHOLOGICAL, body

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


def strict(schema: object, strict: bool = True) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "x", "strict": strict, "schema": schema}}


ACCEPTED = [
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_object", "schema": PERSON}},
    {"response_format": strict(PERSON)},
    {"response_format": strict(PERSON, False)},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "any"}}},
    {"response_format": {"type": "regex", "pattern": "^a+$"}},
    {"response_format": {"type": "lark", "grammar": 'start: "a" | "b"'}},
    {"guided_json": PERSON},
    {"guided_json": json.dumps(PERSON)},
    {"guided_regex": r"\d{4}-\d{2}"},
    {"guided_choice": ["yes", "no", 'a "quote"\n']},
    {"guided_grammar": 'root ::= "a" root | "b"'},
    {"structured_outputs": {"json": PERSON}},
    {"structured_outputs": {"regex": "a|b", "choice": None}},
    {"structured_outputs": {"json_object": True}},
    {"json_schema": PERSON},
    {"grammar": 'start: "x"', "response_format": {"type": "text"}},
]


@pytest.fixture(scope="module")
def shared(request):
    """One app for all of these: its worker processes start once."""
    from .conftest import Api

    made = Api(script=speak("{}"))
    yield made
    made.close()


@pytest.mark.parametrize("fields", ACCEPTED, ids=lambda f: json.dumps(f)[:50])
def test_accepted_forms_reach_the_engine(shared, fields):
    assert shared.chat(**fields).status_code == 200
    assert "start:" in shared.engine.submitted[-1].grammar.source
    assert shared.complete(**fields).status_code == 200


def test_nothing_asked_for_is_no_grammar(shared):
    for fields in ({}, {"response_format": {"type": "text"}}, {"guided_json": None}):
        assert shared.chat(**fields).status_code == 200
        assert shared.engine.submitted[-1].grammar is None


REFUSED = [
    ({"response_format": {"type": "xml"}}, "response_format.type", "unsupported_parameter"),
    ({"response_format": {}}, "response_format.type", None),
    ({"response_format": "json"}, "response_format", None),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", None),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
     "response_format.json_schema.name", None),
    ({"response_format": strict({"type": "objekt"})}, "response_format.json_schema.schema.type", "unsupported_schema"),
    ({"response_format": strict({"properties": {"a": {"items": {"not": {}}}}})},
     "response_format.json_schema.schema.properties.a.items.not", "unsupported_schema"),
    ({"response_format": strict({"anyOf": [{}, {"if": {}, "then": {}}]})},
     "response_format.json_schema.schema.anyOf.1.if", "unsupported_schema"),
    ({"response_format": strict({"type": "string", "format": "phone"})},
     "response_format.json_schema.schema.format", "unsupported_schema"),
    ({"response_format": strict({"properties": {"a": {"type": "string", "pattern": "(?=x)y"}}})},
     "response_format.json_schema.schema.properties.a.pattern", "unsupported_schema"),
    ({"response_format": strict({"$ref": "#/$defs/none"})}, "response_format.json_schema.schema.$ref", "unsupported_schema"),
    ({"response_format": strict({"properties": {"a": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}})},
     "response_format.json_schema.schema.properties.a.oneOf", "unsupported_schema"),
    ({"guided_json": {"$ref": "http://example.com/schema"}}, "guided_json.$ref", "unsupported_schema"),
    ({"guided_json": "{"}, "guided_json", None),
    ({"guided_json": False}, "guided_json", "unsupported_schema"),
    ({"guided_json": {"enum": []}}, "guided_json.enum", "unsupported_schema"),
    ({"guided_regex": "(a"}, "guided_regex", "invalid_grammar"),
    ({"guided_regex": ""}, "guided_regex", None),
    ({"guided_choice": []}, "guided_choice", None),
    ({"guided_choice": ["a", 1]}, "guided_choice", None),
    ({"guided_grammar": "start: nothing"}, "guided_grammar", "invalid_grammar"),
    ({"guided_grammar": 'root ::= "a'}, "guided_grammar", "invalid_grammar"),
    ({"structured_outputs": {}}, "structured_outputs", None),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", None),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "unsupported_parameter"),
    ({"guided_json": PERSON, "guided_regex": "a"}, "guided_regex", None),
    ({"guided_json": PERSON, "ignore_eos": True}, "ignore_eos", None),
]  # fmt: skip


@pytest.mark.parametrize(
    "fields, param, code", REFUSED, ids=[json.dumps(r[0])[:60] for r in REFUSED]
)
def test_refused_forms_name_the_place(shared, fields, param, code):
    refused(shared.chat(**fields), 400, param, code or "invalid_parameter" if code else None)


def test_what_is_not_strict_leaves_out_what_cannot_be_enforced(shared, caplog):
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    assert shared.chat(response_format=strict(schema, False)).status_code == 200
    assert "uniqueItems" in caplog.text
    refused(shared.chat(response_format=strict(schema)), 400,
            "response_format.json_schema.schema.uniqueItems", "unsupported_schema")  # fmt: skip


@pytest.mark.parametrize("name", PATHOLOGICAL)
def test_T28_pathological_grammars_are_refused(shared, name):
    headers = {"content-type": "application/json"}
    response = shared.request("POST", "/v1/chat/completions", content=body(name), headers=headers)
    refused(response, 400)
    assert shared.chat(response_format={"type": "json_object"}).status_code == 200


def test_a_background_response_follows_its_constraint(shared):
    form = {"type": "json_schema", "name": "x", "schema": dict(PERSON)}
    body = {"model": "toy", "input": "hi", "background": True, "text": {"format": form}}
    assert shared.post("/v1/responses", body).status_code == 200
    assert shared.engine.submitted[-1].grammar is not None
    form["schema"]["type"] = "bogus"
    refused(shared.post("/v1/responses", body), 400, "text.format.schema.type", "unsupported_schema")


def test_a_client_that_leaves_cancels_no_grammar():
    """Another one may wait for the same, and the judge counts those that wait."""
    judged: Future[Source] = Future()
    compiled: Future[None] = Future()
    front = types.SimpleNamespace(
        judge=types.SimpleNamespace(source=lambda wanted: judged),
        engine=types.SimpleNamespace(prepare=lambda grammar: compiled),
    )
    constraint = structured.Constraint(Wanted("regex", "a"), "guided_regex")

    async def two() -> None:
        for pending, result in ((judged, Source("start: /a/")), (compiled, None)):
            stays = asyncio.create_task(structured.grammar_of(front, constraint))
            leaves = asyncio.create_task(structured.grammar_of(front, constraint))
            await asyncio.sleep(0.01)
            leaves.cancel()
            await asyncio.wait([leaves])
            assert not pending.cancelled()
            pending.set_result(result)
            if pending is compiled:
                assert (await stays).source == "start: /a/"
            else:
                stays.cancel()

    asyncio.run(two())


def test_half_a_surrogate_pair_is_no_text(shared):
    for field in (
        '"guided_regex": "\\ud800"',
        '"guided_json": {"const": "\\ud800"}',
        '"guided_choice": ["\\udc00"]',
    ):
        body = '{"model": "toy", "prompt": "x", ' + field + "}"
        response = shared.request(
            "POST", "/v1/completions", content=body, headers={"content-type": "application/json"}
        )
        refused(response, 400, json.loads("{" + field + "}").popitem()[0], "invalid_grammar")


def test_T28_a_slow_grammar_holds_nobody_up(make_api):
    """While one grammar is being tried (and given up), another request streams on."""
    api = make_api(script=speak("hello world " * 20))
    api.chat(response_format={"type": "json_object"})  # the workers are there

    async def go() -> tuple[float, int]:
        async with api.client() as client:
            body = {"model": "toy", "messages": [{"role": "user", "content": "x"}]}

            async def slow() -> float:
                begun = time.monotonic()
                bad = {"type": "integer", "multipleOf": 999979}
                response = await client.post(
                    "/v1/chat/completions", json=body | {"guided_json": bad}
                )
                refused(response, 400, "guided_json", "invalid_grammar")
                return time.monotonic() - begun

            task = asyncio.create_task(slow())
            served = 0
            while not task.done():
                response = await client.post("/v1/chat/completions", json=body)
                assert response.status_code == 200
                served += 1
            return task.result(), served

    _, served = asyncio.run(go())
    assert served >= 1


def test_T29_long_bounds_work(shared):
    schema = {"type": "string", "maxLength": 2000}
    assert shared.chat(response_format=strict(schema)).status_code == 200


def test_T11_descriptions_never_reach_the_grammar(shared):
    sources = []
    for words in ("the first", "the second"):
        schema = {**PERSON, "description": words, "title": words, "examples": [words]}
        schema["properties"] = {"name": {"type": "string", "description": words}}
        assert shared.chat(response_format=strict(schema)).status_code == 200
        sources.append(shared.engine.submitted[-1].grammar.source)
    assert sources[0] == sources[1] and "the first" not in sources[0]


def test_a_constraint_begins_behind_the_reasoning(make_api):
    """Where the prompt opens one."""
    opened = toy.TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    served = dataclasses.replace(toy.make_served(), template=ChatTemplate(opened))
    api = make_api(served=served, script=speak("hm</think>{}"))
    answer = api.chat(response_format={"type": "json_object"}).json()["choices"][0]["message"]
    assert api.engine.submitted[-1].grammar.after == "</think>"
    assert answer["content"] == "{}" and answer["reasoning_content"] == "hm"
    api.complete(guided_regex="a")
    assert api.engine.submitted[-1].grammar.after == ""


def test_strict_tools_are_enforced_where_they_may_be_called(make_api):
    served = dataclasses.replace(toy.make_served(), answer_format="hermes")
    api = make_api(served=served, script=speak("fine"))
    function = {"name": "f", "parameters": {"type": "object", "properties": {}}}
    for strict in (True, False):
        tool = {"type": "function", "function": {**function, "strict": strict}}
        assert api.chat(tools=[tool]).status_code == 200
        assert (api.engine.submitted[-1].grammar is not None) == strict
        assert api.chat(tools=[tool], tool_choice="none").status_code == 200
        assert api.engine.submitted[-1].grammar is None


def test_each_choice_has_the_grammar(shared):
    before = len(shared.engine.submitted)
    assert shared.chat(n=3, guided_choice=["a", "b"]).status_code == 200
    assert len({s.grammar for s in shared.engine.submitted[before:]}) == 1
    assert len(shared.engine.submitted) == before + 3


def test_the_model_card_says_so(shared):
    card = shared.get("/v1/models").json()["data"][0]
    assert card["response_format"] == {"json_object": True, "json_schema": True}
