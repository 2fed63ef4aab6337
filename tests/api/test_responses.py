"""The Responses API."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from sparkjax.api.errors import ApiError
from sparkjax.api.responses.request import parse
from sparkjax.api.responses.store import Store, Stored
from sparkjax.api.responses.stream import ResponseStream
from sparkjax.api.wire import Usage
from sparkjax.text.events import (
    ContentDelta,
    ReasoningDelta,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
)

from . import fake_engine

TEXT = "Hello 😀 the world"


@pytest.fixture
def api(make_api):
    return make_api(script=fake_engine.speak(TEXT))


def ask(api, input: Any = "hi", **fields: Any):
    return api.post("/v1/responses", {"model": "toy", "input": input, **fields})


def events_of(response) -> list[dict[str, Any]]:
    """The events of a stream, whose names are checked against their data."""
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    for block in response.text.split("\n\n"):
        if not block or block.startswith(":"):
            continue
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def text_of(response: dict[str, Any]) -> str:
    return "".join(
        part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"]
    )


# --- Answers --------------------------------------------------------------------------------------


def test_what_has_no_meaning_here_is_repeated(api):
    body = ask(api, prompt_cache_key="key", prompt_cache_retention="24h").json()
    assert body["prompt_cache_key"] == "key" and body["prompt_cache_retention"] == "24h"


def test_a_response(api):
    body = ask(api, instructions="be brief", metadata={"a": "b"}).json()
    assert body["object"] == "response" and body["status"] == "completed"
    assert body["id"].startswith("resp_") and body["model"] == "toy"
    (item,) = body["output"]
    assert item["type"] == "message" and item["role"] == "assistant" and item["status"] == "completed"
    (part,) = item["content"]
    assert part == {"type": "output_text", "text": TEXT, "annotations": [], "logprobs": []}
    assert body["usage"]["total_tokens"] == body["usage"]["input_tokens"] + body["usage"]["output_tokens"]
    assert body["instructions"] == "be brief" and body["metadata"] == {"a": "b"}
    assert body["incomplete_details"] is None and body["error"] is None
    tokens = api.engine.submitted[-1].tokens
    assert "<|im_start|>system\nbe brief<|im_end|>" in api.served.tokenizer.decode(
        tokens, skip_special=False
    )


def test_T64_the_order_of_a_response_stream(api):
    events = events_of(ask(api, stream=True))
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = [i for i, kind in enumerate(kinds) if kind == "output_text.delta"]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert deltas == list(range(4, 4 + len(deltas)))
    assert kinds[4 + len(deltas) :] == [
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert "".join(events[i]["delta"] for i in deltas) == TEXT
    assert text_of(events[-1]["response"]) == TEXT
    assert events[0]["response"]["output"] == [] and events[0]["response"]["usage"] is None
    item = events[-1]["response"]["output"][0]["id"]
    assert {event["item_id"] for event in events if "item_id" in event} == {item}
    assert "[DONE]" not in ask(api, stream=True).text


def test_streamed_response_equals_whole(api):
    whole = ask(api, top_logprobs=2).json()
    streamed = events_of(ask(api, stream=True, top_logprobs=2))[-1]["response"]
    volatile = ("id", "created_at", "completed_at")
    item = whole["output"][0]
    assert len(item["content"][0]["logprobs"]) > 3
    for body in (whole, streamed):
        for name in volatile:
            del body[name]
        del body["output"][0]["id"]
    assert whole == streamed


def test_a_cut_response_is_incomplete(api):
    events = events_of(ask(api, max_output_tokens=2, stream=True))
    last = events[-1]
    assert last["type"] == "response.incomplete" and last["response"]["status"] == "incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"]["output"][0]["status"] == "incomplete"
    assert [e["type"] for e in events][-4:-1] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done",
    ]  # fmt: skip


def test_a_failure_ends_the_response_stream(api):
    api.core.crash = RuntimeError("the device is lost")
    events = events_of(ask(api, stream=True))
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"]["code"] == "engine_failure"
    assert "the device is lost" in events[-1]["response"]["error"]["message"]
    assert ask(api).status_code == 503


CALLS = [
    ReasoningDelta("I should "),
    ReasoningDelta("look."),
    ContentDelta("One moment."),
    ToolCallStart(0, "call_a", "weather"),
    ToolArgumentsDelta(0, '{"city": '),
    ToolArgumentsDelta(0, '"Oslo"}'),
    ToolCallEnd(0),
    ToolCallStart(1, "call_b", "note", "custom"),
    ToolArgumentsDelta(1, "free text"),
    ToolCallEnd(1),
]


def test_items_of_reasoning_words_and_calls():
    stream = ResponseStream("k", 0, "toy", {})
    events = stream.begin() + stream.push(CALLS) + stream.end("tool_calls", Usage(5, 7, 1))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done",
        "output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done",
        "output_item.done", "completed",
    ]  # fmt: skip
    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == [
        "reasoning", "message", "function_call", "custom_tool_call",
    ]  # fmt: skip
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "I should look."}]
    assert output[2]["call_id"] == "call_a" and output[2]["arguments"] == '{"city": "Oslo"}'
    assert output[3]["input"] == "free text"
    added = [event["output_index"] for event in events if event["type"].endswith("item.added")]
    assert added == [0, 1, 2, 3] and len({item["id"] for item in output}) == 4
    for event in events:  # the final items are those of their own done events
        if event["type"] == "response.output_item.done":
            assert event["item"] == output[event["output_index"]]


def test_a_cut_call_is_an_incomplete_item():
    stream = ResponseStream("k", 0, "toy", {})
    stream.push([*CALLS[3:5]])
    last = stream.end("length", Usage(5, 7, 0))[-1]["response"]
    assert last["status"] == "incomplete" and last["output"][0]["status"] == "incomplete"
    assert last["output"][0]["arguments"] == '{"city": '


# --- Requests -------------------------------------------------------------------------------------


def messages(items: list[Any]) -> list[dict[str, Any]]:
    return parse({"model": "toy", "input": items}).translation.body["messages"]


def test_items_become_messages():
    found = messages(
        [
            {"role": "developer", "content": "d"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "u"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [],
             "content": [{"type": "reasoning_text", "text": "r"}]},
            {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant",
             "content": [{"type": "output_text", "text": "a", "annotations": []}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "custom_tool_call", "call_id": "c2", "name": "g", "input": "x"},
            {"type": "function_call_output", "call_id": "c1", "output": "1"},
            {"type": "custom_tool_call_output", "call_id": "c2",
             "output": [{"type": "input_text", "text": "2"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "lost"}]},
            {"role": "user", "content": "again"},
        ]
    )  # fmt: skip
    assert found == [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "text", "text": "u"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "a"}], "reasoning_content": "r",
         "tool_calls": [
             {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
             {"id": "c2", "type": "custom", "custom": {"name": "g", "input": "x"}},
         ]},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "2"}]},
        {"role": "user", "content": "again"},
    ]  # fmt: skip


def test_two_assistant_messages_stay_two():
    turns = [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert messages([{"role": "user", "content": "u"}, *turns])[1:] == turns


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"role": "user", "content": [{"type": "video"}]}]}, "input[0].content[0].type"),
        ({"instructions": 5}, "instructions"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10_000}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"include": ["everything"]}, "include[0]"),
        ({"include": [["everything"]]}, "include[0]"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_tool_calls": 1}, "max_tool_calls"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
        ({"background": True, "store": False}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"text": {"format": 5}}, "text.format"),
        ({"stream": "yes"}, "stream"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"audio": {}}, "audio"),
        ({"model": None}, "model"),
    ],
)
def test_errors_name_the_fields_of_this_api(api, fields, param):
    body = {"model": "toy", "input": "hi", **fields}
    response = api.post("/v1/responses", body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param and param.split(".")[-1] in error["message"]


def test_input_tokens_are_counted(api):
    count = api.post("/v1/responses/input_tokens", {"model": "toy", "input": "hi"}).json()
    assert count == {
        "object": "response.input_tokens",
        "input_tokens": ask(api).json()["usage"]["input_tokens"],
    }


# --- The store ------------------------------------------------------------------------------------


def test_a_conversation_continues_from_an_id(api):
    first = ask(api, "one", instructions="only for one").json()
    second = ask(api, "two", previous_response_id=first["id"]).json()
    third = ask(api, "three", previous_response_id=second["id"], store=False).json()
    prompt = api.served.tokenizer.decode(api.engine.submitted[-1].tokens, skip_special=False)
    turns = [("user", "one"), ("assistant", TEXT), ("user", "two"), ("assistant", TEXT), ("user", "three")]
    assert prompt == "".join(
        f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns
    ) + "<|im_start|>assistant\n"
    assert third["previous_response_id"] == second["id"]
    assert api.get(f"/v1/responses/{third['id']}").status_code == 404


def test_retrieve_list_and_delete(api):
    made = ask(api, [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]).json()
    path = f"/v1/responses/{made['id']}"
    assert api.get(path).json() == made
    listed = api.get(f"{path}/input_items").json()
    assert [item["content"][0]["text"] for item in listed["data"]] == ["two", "one"]
    assert listed["has_more"] is False and listed["first_id"] == listed["data"][0]["id"]
    page = api.get(f"{path}/input_items?order=asc&limit=1").json()
    assert [item["content"][0]["text"] for item in page["data"]] == ["one"] and page["has_more"]
    rest = api.get(f"{path}/input_items?order=asc&after={page['last_id']}").json()
    assert [item["content"][0]["text"] for item in rest["data"]] == ["two"]
    for query in ("limit=0", "limit=x", "order=up", "after=none"):
        assert api.get(f"{path}/input_items?{query}").status_code == 400
    assert api.request("POST", f"{path}/cancel").status_code == 400
    allowed = api.request("PATCH", path)
    assert allowed.status_code == 405 and set(allowed.headers["allow"].split(", ")) == {"GET", "HEAD", "DELETE"}
    assert api.request("DELETE", path).json() == {"id": made["id"], "object": "response", "deleted": True}
    for method, where in (("GET", path), ("DELETE", path), ("GET", f"{path}/input_items"),
                          ("POST", f"{path}/cancel")):  # fmt: skip
        response = api.request(method, where)
        assert response.status_code == 404 and response.json()["error"]["code"] == "response_not_found"


def test_what_one_key_stores_another_cannot_see(make_api, tmp_path):
    file = tmp_path / "keys"
    file.write_text("one\ntwo\n")
    api = make_api(script=fake_engine.speak(TEXT), api_keys=str(file))

    def head(key: str) -> dict[str, Any]:
        return {"headers": {"Authorization": f"Bearer {key}"}}

    made = api.post("/v1/responses", {"model": "toy", "input": "hi"}, **head("one")).json()
    assert api.get(f"/v1/responses/{made['id']}", **head("one")).json() == made
    assert api.get(f"/v1/responses/{made['id']}", **head("two")).status_code == 404
    body = {"model": "toy", "input": "hi", "previous_response_id": made["id"]}
    response = api.post("/v1/responses", body, **head("two"))
    assert response.json()["error"]["code"] == "previous_response_not_found"


def stored(id: str, text: str = "", running: bool = False) -> Stored:
    stream = ResponseStream(id, 0, "toy", {})
    stream.push([ContentDelta(text)])
    if not running:
        stream.end("stop", Usage(0, 0, 0))
    return Stored("", (), stream)


def test_the_store_is_bounded_by_count_bytes_and_age():
    now = [0.0]
    store = Store(2, 10_000, 100.0, clock=lambda: now[0])
    for id in "abc":
        store.put(stored(id))
        store.get(f"resp_{id}", "")
    assert len(store) == 2
    with pytest.raises(ApiError):
        store.get("resp_a", "")
    store.get("resp_b", "")  # now c is the older one
    store.put(stored("d"))
    with pytest.raises(ApiError):
        store.get("resp_c", "")
    store.put(stored("e", "x" * 9_000))
    assert store.bytes <= 10_000 and store.get("resp_e", "")
    store.put(stored("f", "x" * 20_000))
    with pytest.raises(ApiError):
        store.get("resp_f", "")
    assert store.bytes == 0 and len(store) == 0
    store.put(stored("g"))
    now[0] = 101.0
    with pytest.raises(ApiError):
        store.get("resp_g", "")
    assert store.bytes == 0


def test_without_a_store_nothing_is_kept(make_api):
    api = make_api(script=fake_engine.speak(TEXT), stored_responses=0)
    made = ask(api).json()
    assert made["status"] == "completed"
    assert api.get(f"/v1/responses/{made['id']}").status_code == 404
    assert ask(api, background=True).status_code == 400


# --- Background -----------------------------------------------------------------------------------


def run(api, scenario):
    async def go():
        async with api.client() as client:
            return await scenario(client)

    return asyncio.run(go())


async def settled(client, id: str) -> dict[str, Any]:
    for _ in range(500):
        body = (await client.get(f"/v1/responses/{id}")).json()
        if body["status"] not in ("queued", "in_progress"):
            return body
        await asyncio.sleep(0.01)
    raise AssertionError(body)


def test_a_conversation_goes_on_without_a_call_that_was_cut():
    stream = ResponseStream("k", 0, "toy", {})
    stream.push([ContentDelta("Hm."), ToolCallStart(0, "call_a", "f"), ToolArgumentsDelta(0, "{}")])
    stream.push([ToolCallEnd(0), ToolCallStart(1, "call_b", "f"), ToolArgumentsDelta(1, '{"a": "x')])
    stream.end("length", Usage(1, 1, 0))
    said = Stored("", (), stream).conversation
    assert [item.get("call_id") for item in said] == [None, "call_a"]
    assert [item["status"] for item in stream.output] == ["completed", "completed", "incomplete"]


def test_a_background_response_goes_on_alone(api):
    async def scenario(client):
        made = await client.post("/v1/responses", json={"model": "toy", "input": "hi", "background": True})
        assert made.json()["status"] in ("queued", "in_progress") and made.json()["output"] == []
        return await settled(client, made.json()["id"])

    body = run(api, scenario)
    assert body["status"] == "completed" and text_of(body) == TEXT


def test_a_background_response_is_cancelled(make_api):
    api = make_api(script=fake_engine.babble)
    api.core.step_seconds = 0.01

    async def scenario(client):
        body = {"model": "toy", "input": "hi", "background": True, "max_output_tokens": 300}
        id = (await client.post("/v1/responses", json=body)).json()["id"]
        busy = await client.post(
            "/v1/responses", json={"model": "toy", "input": "x", "previous_response_id": id}
        )
        assert busy.status_code == 400
        cancelled = (await client.post(f"/v1/responses/{id}/cancel")).json()
        assert cancelled["status"] == "cancelled"
        again = (await client.post(f"/v1/responses/{id}/cancel")).json()
        assert again == cancelled == (await client.get(f"/v1/responses/{id}")).json()
        await asyncio.to_thread(api.engine.wait_idle)

    run(api, scenario)
    assert set(api.engine.ended.values()) == {"cancelled"}


def test_half_a_surrogate_pair_comes_back_as_a_character(api):
    half = "a\ud83d"
    body = {"model": "toy", "input": half, "instructions": half, "metadata": {"k": half}}
    headers = {"content-type": "application/json"}
    for more in ({}, {"stream": True}, {"background": True, "stream": True}):
        sent = json.dumps(body | more)
        made = api.request("POST", "/v1/responses", content=sent, headers=headers)
        assert made.status_code == 200 and "a\ufffd" in made.text
        done = events_of(made)[-1]["response"] if more else made.json()
        assert done["status"] == "completed" and done["metadata"] == {"k": "a\ufffd"}
    listed = api.get(f"/v1/responses/{done['id']}/input_items").json()["data"]
    assert listed[0]["content"][0]["text"] == "a\ufffd"


def test_a_background_stream_can_be_read_again(api):
    async def scenario(client):
        body = {"model": "toy", "input": "hi", "background": True, "stream": True}
        first = await client.post("/v1/responses", json=body)
        events = events_of(first)
        id = events[0]["response"]["id"]
        assert [e["type"] for e in events[:3]] == [
            "response.created", "response.queued", "response.in_progress",
        ]  # fmt: skip
        assert events_of(await client.get(f"/v1/responses/{id}?stream=true")) == events
        rest = await client.get(f"/v1/responses/{id}?stream=true&starting_after=5")
        assert events_of(rest) == events[6:]
        for number in ("x", "--5", "-5", "%D9%A3"):
            bad = await client.get(f"/v1/responses/{id}?stream=true&starting_after={number}")
            assert bad.status_code == 400

    run(api, scenario)


def test_only_background_streams_can_be_read_again(api):
    id = ask(api).json()["id"]
    assert api.get(f"/v1/responses/{id}?stream=true").status_code == 400


def test_T49_a_client_that_leaves_a_response_cancels_it(make_api):
    api = make_api(script=fake_engine.babble)
    api.core.step_seconds = 0.01

    async def scenario(client):
        body = {"model": "toy", "input": "hi", "stream": True}
        task = asyncio.create_task(client.post("/v1/responses", json=body))
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.to_thread(api.engine.wait_idle)
        api.core.script = fake_engine.speak(TEXT)
        return (await client.post("/v1/responses", json={"model": "toy", "input": "hi"})).json()

    assert text_of(run(api, scenario)) == TEXT
