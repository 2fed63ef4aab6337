"""Structured output from request to answer: the real engine and a tiny model behind the HTTP API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import httpx
import jsonschema
import pytest

from sparkjax.api.app import create_app
from sparkjax.api.served import served_model
from sparkjax.engine.engine import Engine
from sparkjax.engine.service import EngineService
from sparkjax.settings import Config, Model

SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "minLength": 2, "maxLength": 10},
        "ok": {"type": "boolean"},
        "kind": {"enum": ["α", "β", "stop here"]},
    },
    "required": ["title", "ok", "kind"],
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}


class Served:
    def __init__(self, engine: Engine):
        self.service = EngineService(engine)
        config = Config(model=Model(path="tiny", name="tiny", answer_format="hermes"))
        self.app = create_app(
            served_model(engine.model, engine.limits, config), self.service, config.http
        )
        self.service.start()

    def post(self, *bodies: dict, path: str = "/v1/chat/completions") -> list[httpx.Response]:
        """All at the same time."""

        async def go() -> list[httpx.Response]:
            transport = httpx.ASGITransport(app=self.app)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://x", timeout=120
            ) as client:
                return await asyncio.gather(*(client.post(path, json=self.body(b)) for b in bodies))

        return asyncio.run(go())

    def body(self, fields: dict) -> dict:
        asked = {} if "prompt" in fields else {"messages": [{"role": "user", "content": "hello"}]}
        return {"model": "tiny", "temperature": 1, "max_tokens": 300, **asked, **fields}

    def chat(self, **fields) -> dict:
        (response,) = self.post(fields)
        assert response.status_code == 200, response.text
        return response.json()

    def stream(self, **fields) -> tuple[str, str]:
        """(text, why it ended)."""
        (response,) = self.post({**fields, "stream": True})
        lines = [
            line.removeprefix("data: ")
            for line in response.text.split("\n\n")
            if line.startswith("data: {")
        ]
        choices = [c for line in lines for c in json.loads(line)["choices"]]
        return "".join(c["delta"].get("content") or "" for c in choices), choices[-1][
            "finish_reason"
        ]

    def calls(self, **fields) -> list[tuple[str, str]]:
        """(name, arguments) of a stream's calls."""
        (response,) = self.post({**fields, "stream": True})
        lines = [line[6:] for line in response.text.split("\n\n") if line.startswith("data: {")]
        found: list[list[str]] = []
        for choice in (c for line in lines for c in json.loads(line)["choices"]):
            for delta in choice["delta"].get("tool_calls") or []:
                if delta["index"] == len(found):
                    found.append([delta["function"]["name"], ""])
                found[delta["index"]][1] += delta["function"].get("arguments") or ""
        return [(name, arguments) for name, arguments in found]


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[Served]:
    made = Served(engine)
    yield made
    made.service.shutdown()
    made.app.state.front.close()


def content(answer: dict, choice: int = 0) -> str:
    return answer["choices"][choice]["message"]["content"]


def valid(text: str) -> None:
    jsonschema.validate(json.loads(text), SCHEMA)


def test_streamed_is_whole_and_both_are_valid(server: Served):
    for seed in range(4):
        fields = {"response_format": FORMAT, "seed": seed}
        whole = server.chat(**fields)
        valid(content(whole))
        assert whole["choices"][0]["finish_reason"] == "stop"
        assert server.stream(**fields) == (content(whole), "stop")


def test_every_choice_is_valid_and_the_seed_decides(server: Served):
    first = server.chat(response_format=FORMAT, seed=9, n=4)
    texts = [content(first, i) for i in range(4)]
    for text in texts:
        valid(text)
    assert len(set(texts)) > 1
    again = server.chat(response_format=FORMAT, seed=9, n=4)
    assert [content(again, i) for i in range(4)] == texts
    assert content(server.chat(response_format=FORMAT, seed=10)) == texts[1]


def test_length_cuts_a_valid_beginning(server: Served):
    whole = content(server.chat(response_format=FORMAT, seed=2))
    for most in (1, 3, 8):
        cut = server.chat(response_format=FORMAT, seed=2, max_tokens=most)
        assert cut["choices"][0]["finish_reason"] == "length"
        assert whole.startswith(content(cut).rstrip("\ufffd"))


def test_T20_stop_strings_hold_in_structured_answers_too(server: Served):
    """The stop string wins, on every path alike."""
    fields = {"response_format": FORMAT, "stop": ['"ok"'], "seed": 1}
    whole = server.chat(**fields)
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert '"ok"' not in content(whole) and content(whole).startswith("{")
    assert server.stream(**fields) == (content(whole), "stop")
    unharmed = server.chat(response_format=FORMAT, stop=["nowhere in it"], seed=1)
    valid(content(unharmed))
    assert content(unharmed).startswith(content(whole))


def test_log_probabilities_are_of_the_raw_distribution(server: Served):
    answer = server.chat(guided_choice=["a", "b"], logprobs=True, top_logprobs=2, temperature=0)
    scored = answer["choices"][0]["logprobs"]["content"][0]
    assert (
        scored["token"] == content(answer)[0]
        and scored["logprob"] <= scored["top_logprobs"][0]["logprob"]
    )


def test_choices_patterns_and_grammars(server: Served):
    assert content(server.chat(guided_choice=["Köln", "Bonn"])) in ("Köln", "Bonn")
    digits = content(server.chat(guided_regex=r"[0-9]{4}"))
    assert len(digits) == 4 and digits.isdecimal()
    lark = 'start: pair+\npair: "(" pair* ")"'
    (response,) = server.post(
        {
            "guided_grammar": lark,
            "prompt": "x",
        },
        path="/v1/completions",
    )
    text = response.json()["choices"][0]["text"]
    assert text and set(text) <= set("()")
    answer = content(server.chat(response_format={"type": "json_object"}, max_tokens=1500, seed=4))
    assert answer.startswith("{")


WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "stop_now"}},
]


def test_T32_calls_that_must_come_do_and_fit_their_schemas(server: Served):
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", named):
        for seed in range(3):
            fields = {"tools": TOOLS, "tool_choice": choice, "seed": seed, "max_tokens": 1500,
                      "parallel_tool_calls": False}  # fmt: skip
            answer = server.chat(**fields)["choices"][0]
            assert answer["finish_reason"] == "tool_calls", answer
            (call,) = answer["message"]["tool_calls"]
            name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
            assert name == "get_weather" or (choice == "required" and name == "stop_now")
            if name == "get_weather":
                jsonschema.validate(arguments, WEATHER)
            streamed = server.calls(**fields)
            assert streamed == [(name, call["function"]["arguments"])]


def test_T32_a_schema_beside_tools_that_may_be_called(server: Served):
    """Either is enforced: an answer that fits, or calls that fit."""
    for seed in range(4):
        fields = {"tools": TOOLS, "response_format": FORMAT, "seed": seed, "max_tokens": 1900}
        answer = server.chat(**fields)["choices"][0]
        if answer["finish_reason"] == "tool_calls":
            for call in answer["message"]["tool_calls"]:
                if call["function"]["name"] == "get_weather":
                    jsonschema.validate(json.loads(call["function"]["arguments"]), WEATHER)
        else:
            valid(answer["message"]["content"])
    (other,) = server.post({"tools": TOOLS, "guided_regex": "a"})
    assert other.status_code == 400 and other.json()["error"]["param"] == "guided_regex"


def test_strict_tools_name_what_cannot_be_enforced(server: Served):
    bad = {"type": "object", "properties": {"a": {"not": {}}}}
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": bad}}
    (refused,) = server.post({"tools": [tool], "tool_choice": "required"})
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] == "tools.f.parameters.properties.a.not"


def test_others_are_not_disturbed(server: Served):
    """A free request streams the same among constrained ones, good and bad."""
    free = {"seed": 5, "max_tokens": 40, "temperature": 0.8}
    alone = server.chat(**free)
    bad = {"guided_json": {"type": "integer", "multipleOf": 999983}}
    responses = server.post(
        {"response_format": FORMAT, "seed": 1}, free, bad, {"response_format": FORMAT, "seed": 2}
    )
    assert [r.status_code for r in responses] == [200, 200, 400, 200]
    assert content(responses[1].json()) == content(alone)
    valid(content(responses[0].json()))


def test_a_client_that_leaves_frees_its_grammar(server: Served, engine: Engine):
    async def go() -> None:
        transport = httpx.ASGITransport(app=server.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            body = server.body(
                {"response_format": {"type": "json_object"}, "max_tokens": 1500, "seed": 4}
            )
            task = asyncio.create_task(client.post("/v1/chat/completions", json=body))
            while not server.service.gauges().running:
                await asyncio.sleep(0.005)
            task.cancel()
            while server.service.open_requests:
                await asyncio.sleep(0.005)

    asyncio.run(go())
    server.chat(guided_choice=["a"])  # a tick later
    assert len(engine.runner.masks) == 0
