"""Anthropic's Messages API."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from sparkjax.api.anthropic.request import parse
from sparkjax.api.anthropic.stream import MessageStream
from sparkjax.api.wire import Usage
from sparkjax.engine.records import Sampling

from . import fake_engine
from .test_responses import CALLS, events_of

TEXT = "Hello 😀 the world"


@pytest.fixture
def api(make_api):
    return make_api(script=fake_engine.speak(TEXT))


def ask(api, content: Any = "hi", **fields: Any):
    body = {"model": "toy", "max_tokens": 64, "messages": [{"role": "user", "content": content}]}
    return api.post("/v1/messages", body | fields)


# --- Answers --------------------------------------------------------------------------------------


def test_a_message(api):
    response = ask(api, system="be brief", metadata={"user_id": "u"})
    body = response.json()
    assert body["type"] == "message" and body["role"] == "assistant" and body["model"] == "toy"
    assert body["id"].startswith("msg_")
    assert body["content"] == [{"type": "text", "text": TEXT}]
    assert body["stop_reason"] == "end_turn" and body["stop_sequence"] is None
    assert body["usage"]["output_tokens"] == len(api.served.tokenizer.encode(TEXT)) + 1
    assert response.headers["request-id"] == response.headers["x-request-id"]
    prompt = api.served.tokenizer.decode(api.engine.submitted[-1].tokens, skip_special=False)
    assert prompt.startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi")


def test_the_order_of_a_message_stream(api):
    events = events_of(ask(api, stream=True))
    kinds = [event["type"] for event in events]
    deltas = kinds.count("content_block_delta")
    assert kinds == [
        "message_start", "content_block_start", "ping", *["content_block_delta"] * deltas,
        "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    text = "".join(e["delta"]["text"] for e in events if e["type"] == "content_block_delta")
    assert text == TEXT
    start, last = events[0]["message"], events[-2]
    assert start["content"] == [] and start["stop_reason"] is None
    assert start["usage"]["input_tokens"] > 0
    assert last["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert last["usage"]["output_tokens"] > start["usage"]["output_tokens"]


def accumulated(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of a stream's events."""
    message = events[0]["message"]
    for event in events[1:]:
        match event["type"]:
            case "content_block_start":
                message["content"].append(event["content_block"] | {"partial": ""})
            case "content_block_delta":
                block, delta = message["content"][event["index"]], event["delta"]
                for key in ("text", "thinking", "signature"):
                    if key in delta:
                        block[key] += delta[key]
                block["partial"] += delta.get("partial_json", "")
            case "content_block_stop":
                block = message["content"][event["index"]]
                partial = block.pop("partial")
                if block["type"] == "tool_use":
                    block["input"] = json.loads(partial or "{}")
            case "message_delta":
                message |= event["delta"] | {"usage": event["usage"]}
    return message


def test_streamed_message_equals_whole(api):
    whole = ask(api, stop_sequences=["wor"]).json()
    streamed = accumulated(events_of(ask(api, stop_sequences=["wor"], stream=True)))
    assert whole.pop("id") and streamed.pop("id")
    assert streamed == whole
    assert whole["stop_reason"] == "stop_sequence" and whole["stop_sequence"] == "wor"
    assert whole["content"][0]["text"] == TEXT.split("wor")[0]


def test_T08_blocks_of_thinking_words_and_calls():
    stream = MessageStream("k", "toy")
    usage = Usage(9, 7, 4)
    events = stream.begin(usage) + stream.push(CALLS[:7]) + stream.end("tool_calls", usage, None)
    kinds = [e["type"] + ":" + e.get("delta", {}).get("type", "") for e in events]
    assert kinds == [
        "message_start:",
        "content_block_start:", "ping:", "content_block_delta:thinking_delta",
        "content_block_delta:thinking_delta", "content_block_delta:signature_delta", "content_block_stop:",
        "content_block_start:", "content_block_delta:text_delta", "content_block_stop:",
        "content_block_start:", "content_block_delta:input_json_delta",
        "content_block_delta:input_json_delta", "content_block_stop:",
        "message_delta:", "message_stop:",
    ]  # fmt: skip
    parts = [e["delta"]["partial_json"] for e in events if "partial_json" in e.get("delta", {})]
    assert "".join(parts) == '{"city": "Oslo"}' and parts[0].startswith('{"')
    message = stream.message()
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use"]
    assert message["content"][0]["thinking"] == "I should look." and message["content"][0]["signature"]
    assert message["content"][2] == {
        "type": "tool_use", "id": "call_a", "name": "weather", "input": {"city": "Oslo"},
    }  # fmt: skip
    assert message["stop_reason"] == "tool_use"
    assert message["usage"]["input_tokens"] == 5 and message["usage"]["cache_read_input_tokens"] == 4
    assert accumulated(events) == message


def test_T10_a_cut_call_is_no_call():
    stream = MessageStream("k", "toy")
    stream.push(CALLS[3:5])
    events = stream.end("length", Usage(1, 1, 0), None)
    assert events[-2]["delta"]["stop_reason"] == "max_tokens"
    assert stream.message()["content"] == []


def test_an_empty_message_has_no_blocks(make_api):
    api = make_api(script=fake_engine.speak(""))
    assert ask(api).json()["content"] == []
    assert [e["type"] for e in events_of(ask(api, stream=True))] == [
        "message_start", "message_delta", "message_stop",
    ]  # fmt: skip


def test_cut_messages_say_so(api):
    assert ask(api, max_tokens=2).json()["stop_reason"] == "max_tokens"


# --- Requests -------------------------------------------------------------------------------------


def messages(*given: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    last = {"role": "user", "content": "go on"}
    body = {"model": "toy", "max_tokens": 1, "messages": [*given, last], **fields}
    return parse(body).body["messages"][:-1]


def test_blocks_become_messages():
    found = messages(
        {"role": "user", "content": [
            {"type": "text", "text": "look"},
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}},
        ]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "so"},
            {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": "é"}},
        ]},
        {"role": "user", "content": [
            {"type": "text", "text": "and"},
            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "r"}]},
            {"type": "tool_result", "tool_use_id": "t2", "is_error": True},
        ]},
        system=[{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
    )  # fmt: skip
    assert found == [
        {"role": "system", "content": [{"type": "text", "text": "s"}]},
        {"role": "user", "content": [
            {"type": "text", "text": "look"},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
        ]},
        {"role": "assistant", "content": "so", "reasoning_content": "hm", "tool_calls": [
            {"id": "t1", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}},
        ]},
        {"role": "tool", "tool_call_id": "t1", "content": [{"type": "text", "text": "r"}]},
        {"role": "tool", "tool_call_id": "t2", "content": "error"},
        {"role": "user", "content": [{"type": "text", "text": "and"}]},
    ]  # fmt: skip


def test_tools_and_switches_become_chat_fields():
    body = parse(
        {
            "model": "toy", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}],
            "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"},
                       "cache_control": {"type": "ephemeral"}}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            "stop_sequences": ["a"], "top_k": 3, "metadata": {"user_id": "u"},
            "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {}}},
        }
    ).body  # fmt: skip
    assert body["tools"] == [
        {"type": "function",
         "function": {"name": "f", "parameters": {"type": "object"}, "description": "d"}},
    ]  # fmt: skip
    assert body["tool_choice"] == "required" and body["parallel_tool_calls"] is False
    assert body["stop"] == ["a"] and body["top_k"] == 3 and body["user"] == "u"
    assert body["reasoning_effort"] == "low"
    assert body["response_format"]["json_schema"]["schema"] == {}


@pytest.mark.parametrize(
    "fields, name",
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10_000}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]},
         "messages[1]"),
        ({"system": 5}, "system"),
        ({"temperature": 1.5}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"stop": "x"}, "stop"),
        ({"lora": ["x"]}, "lora"),
    ],
)  # fmt: skip
def test_errors_in_anthropic_s_shape(api, fields, name):
    response = ask(api, **fields)
    assert response.status_code == 400, response.text
    body = response.json()
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert body["error"]["message"].startswith(name) and body["request_id"]


def test_statuses_have_anthropic_s_types(make_api, tmp_path):
    file = tmp_path / "keys"
    file.write_text("right\n")
    api = make_api(script=fake_engine.speak(TEXT), api_keys=str(file), max_body_bytes=2000)

    def kind(status: int, response) -> str:
        assert response.status_code == status, response.text
        return response.json()["error"]["type"]

    right = {"headers": {"x-api-key": "right"}}
    body = {"model": "toy", "max_tokens": 4, "messages": [{"role": "user", "content": "x"}]}
    assert api.post("/v1/messages", body, **right).status_code == 200
    assert kind(401, api.post("/v1/messages", body)) == "authentication_error"
    assert kind(401, api.post("/v1/messages", body, headers={"x-api-key": "wrong"}))
    assert kind(404, api.post("/v1/messages", body | {"model": "other"}, **right)) == "not_found_error"
    assert kind(405, api.get("/v1/messages", **right)) == "invalid_request_error"
    large = {"content": "x" * 3000, "role": "user"}
    assert kind(413, api.post("/v1/messages", body | {"messages": [large]}, **right)) == "request_too_large"
    api.engine.drain()
    assert kind(503, api.post("/v1/messages", body, **right)) == "api_error"


def test_overload_is_529_for_anthropic_s_clients(make_api):
    limits = msgspec.structs.replace(fake_engine.LIMITS, slots=1, rows=(2,), queue=1)
    api = make_api(limits=limits)
    api.core.running.clear()
    for _ in range(2):
        api.engine.submit((5,), Sampling(), 5, (), None, lambda event: None)
    response = ask(api)
    api.core.running.set()
    assert response.status_code == 529 and response.json()["error"]["type"] == "overloaded_error"
    assert int(response.headers["retry-after"]) >= 1


def test_a_failure_ends_the_message_stream(api):
    api.core.crash = RuntimeError("the device is lost")
    events = events_of(ask(api, stream=True))
    assert events[-1]["type"] == "error" and events[-1]["error"]["type"] == "api_error"
    assert "the device is lost" in events[-1]["error"]["message"]


def test_tokens_are_counted_without_a_limit(api):
    body = {"model": "toy", "messages": [{"role": "user", "content": "hi"}]}
    count = api.post("/v1/messages/count_tokens", body).json()
    usage = ask(api).json()["usage"]
    assert count == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    bad = api.post("/v1/messages/count_tokens", body | {"messages": 5})
    assert bad.status_code == 400 and bad.json()["type"] == "error"


def test_models_are_listed_for_anthropic_s_clients(api):
    version = {"headers": {"anthropic-version": "2023-06-01"}}
    listed = api.get("/v1/models", **version).json()
    assert [card["id"] for card in listed["data"]] == ["toy", "org/toy-alias"]
    assert listed["has_more"] is False and listed["last_id"] == "org/toy-alias"
    assert api.get("/v1/models/toy", **version).json() == listed["data"][0]
    assert listed["data"][0]["type"] == "model" and listed["data"][0]["created_at"].endswith("Z")


def test_models_that_do_not_reason_are_spared_the_switch(api):
    for thinking in ({"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}, {"type": "adaptive"}):
        assert ask(api, thinking=thinking).status_code == 200
    assert ask(api, thinking={"type": "enabled", "budget_tokens": 0}).status_code == 400
