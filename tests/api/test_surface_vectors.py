"""The streams of the Responses and Messages APIs against those of DeepSeek's own protocol code: the
order of the events, their fields and what they fold to. How finely deltas are cut is free."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sparkjax.text.deepseek import V41, DeepSeekEncoder

from . import fake_engine, talk, toy
from .test_responses import events_of

LIMITS = msgspec.structs.replace(fake_engine.LIMITS, pages=1000, context=4096)
FOLDER = Path(__file__).parents[1] / "data" / "parsing"
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
FREE = frozenset(
    ["id", "item_id", "call_id", "sequence_number", "signature", "phase", "encrypted_content",
     "logprobs", "service_tier", "model", "created_at", "completed_at"]
)  # fmt: skip
"""Placeholders, or the vendor's own."""
CUT = {
    "response.output_text.delta": "delta",
    "response.reasoning_text.delta": "delta",
    "response.function_call_arguments.delta": "delta",
    "text_delta": "text",
    "thinking_delta": "thinking",
    "input_json_delta": "partial_json",
}


def cases(name: str) -> list[Any]:
    found = json.loads((FOLDER / f"events_{name}.json").read_text())["cases"]
    return [pytest.param(case, id=case["id"]) for case in found]


def plain(value: Any) -> Any:
    """A value without what is free."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items() if k not in FREE}
    return [plain(each) for each in value] if isinstance(value, list) else value


def folded(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Events without what is free, neighbouring deltas joined."""
    out: list[dict[str, Any]] = []
    for event in map(plain, events):
        for body in ("response", "message"):
            if body in event:  # of a whole object, what this API promises
                kept = ("status", "output", "incomplete_details", "role", "content", "stop_reason")
                event[body] = {k: v for k, v in event[body].items() if k in kept}
        event.pop("usage", None)
        if event["type"].endswith("arguments.done"):
            event.pop("name", None)
        inner = event.get("delta") if isinstance(event.get("delta"), dict) else event
        field = CUT.get(inner["type"]) if "type" in inner else None
        before = out[-1] if out else {}
        last = before.get("delta") if isinstance(before.get("delta"), dict) else before
        if field and last.get("type") == inner["type"] and event["type"] == before["type"]:
            last[field] += inner[field]
        else:
            out.append(event)
    return out


def without_cut_call(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events but for a call that the limit cut off: it may be begun or not."""
    kept = []
    for event in events:
        shown = event.get("item") or event.get("content_block") or {}
        if shown.get("type") in ("function_call", "tool_use") or "arguments" in event["type"]:
            continue
        if event["type"] in ("content_block_delta", "content_block_stop", "ping"):
            continue
        if "response" in event:
            event["response"].pop("output")
        kept.append(event)
    return kept


def served_as(make_api, case):
    ids = talk.make_tokenizer().encode_rendered("".join(case["pieces"]))
    ids += [toy.END] if case["finish"] == "stop" else []
    served = dataclasses.replace(
        talk.make_served(), template=DeepSeekEncoder(V41), model_type="deepseek_v41"
    )
    api = make_api(served=served, script=lambda submit: ids, limits=LIMITS)
    return api, max(len(ids), 1)


def compare(case, ours: list[dict[str, Any]]) -> None:
    got, want = folded(ours), folded(case["events"])
    if case["id"] == "length-call":
        got, want = without_cut_call(got), without_cut_call(want)
    assert got == want


@pytest.mark.parametrize("case", cases("responses"))
@pytest.mark.parametrize("burst", [1, 7])
def test_T64_response_streams_are_those_of_a_production_server(make_api, case, burst):
    api, limit = served_as(make_api, case)
    api.core.burst = burst
    tool = {"type": "function", "name": "get_weather", "parameters": WEATHER}
    body = {
        "model": "toy", "input": "weather?", "tools": [tool], "stream": True, "max_output_tokens": limit,
        "reasoning": {"effort": "high" if case["thinking"] else "none"},
    }  # fmt: skip
    ours = events_of(api.post("/v1/responses", body))
    compare(case, ours)
    vendor = {"content_filters", "moderation"}
    assert set(case["events"][-1]["response"]) - vendor <= set(ours[-1]["response"])
    whole = api.post("/v1/responses", body | {"stream": False}).json()
    assert plain(whole["output"]) == plain(ours[-1]["response"]["output"])


@pytest.mark.parametrize("case", cases("messages"))
@pytest.mark.parametrize("burst", [1, 7])
def test_T08_message_streams_are_those_of_a_production_server(make_api, case, burst):
    api, limit = served_as(make_api, case)
    api.core.burst = burst
    body = {
        "model": "toy", "messages": [{"role": "user", "content": "weather?"}], "stream": True,
        "tools": [{"name": "get_weather", "input_schema": WEATHER}], "max_tokens": limit,
        "thinking": {"type": "enabled" if case["thinking"] else "disabled"},
    }  # fmt: skip
    ours = events_of(api.post("/v1/messages", body))
    compare(case, ours)
    assert ours[-1] == {"type": "message_stop"}
    whole = api.post("/v1/messages", body | {"stream": False}).json()
    assert whole["stop_reason"] == ours[-2]["delta"]["stop_reason"]
