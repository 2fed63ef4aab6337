"""Bodies of requests: whatever is sent, an answer or a refusal that names the field."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import httpx

from tests.api import talk
from tests.api.conftest import Api

from .texts import Check, value

TOOL = talk.function(city={"type": "string"}, days={"type": "integer", "minimum": 1})
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
    {"role": "assistant", "content": None, "reasoning_content": "Look.", "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}]},
    {"role": "tool", "tool_call_id": "c1", "content": "3 °C"},
    {"role": "user", "content": "Sure?"},
]  # fmt: skip
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "toy", "messages": MESSAGES, "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 4,
        "stop": ["x"], "seed": 1, "n": 1, "logprobs": True, "top_logprobs": 2, "tools": [TOOL],
        "tool_choice": "auto", "parallel_tool_calls": False, "logit_bias": {"5": 1}, "stream": False,
        "reasoning_effort": "low", "thinking": {"type": "enabled", "budget_tokens": 9},
        "chat_template_kwargs": {"enable_thinking": True}, "metadata": {"k": "v"}},
    "/v1/completions": {
        "model": "toy", "prompt": "hi", "max_tokens": 3, "echo": True, "logprobs": 2, "stop": "q",
        "stream": True, "stream_options": {"include_usage": True}, "min_p": 0.1, "guided_choice": ["a", "b"]},
    "/v1/responses": {
        "model": "toy", "max_output_tokens": 3, "instructions": "Be brief.", "store": False,
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                  {"type": "reasoning", "summary": [], "content": []},
                  {"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": "{}"},
                  {"type": "function_call_output", "call_id": "c", "output": "3"}],
        "tools": [{"type": "function", **TOOL["function"]}], "tool_choice": "auto",
        "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
        "reasoning": {"effort": "low"}, "include": [], "metadata": {}, "truncation": "disabled"},
    "/v1/messages": {
        "model": "toy", "max_tokens": 3, "system": "Be brief.", "stream": False, "stop_sequences": ["x"],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]},
                     {"role": "assistant", "content": [
                         {"type": "thinking", "thinking": "h", "signature": ""},
                         {"type": "tool_use", "id": "t", "name": "get_weather", "input": {}}]},
                     {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "3"}]}],
        "tools": [{"name": "get_weather", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto"}, "thinking": {"type": "disabled"}, "metadata": {"user_id": "u"}},
    "/v1/messages/count_tokens": {"model": "toy", "messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses/input_tokens": {"model": "toy", "input": "hi"},
    "/v1/score": {"model": "toy", "text_1": "a", "text_2": ["b", "c"]},
    "/v1/embeddings": {"model": "toy", "input": ["a"], "encoding_format": "float"},
    "/tokenize": {"model": "toy", "prompt": "hi", "add_special_tokens": True},
    "/detokenize": {"model": "toy", "tokens": [1, 2, 300]},
}  # fmt: skip
ODD: list[Any] = [None, True, False, 0, -1, 1, 2**63, -(2**70), 1e308, 0.5, "", "x", "\x00", "auto", "none",
                  [], [[]], {}, {"type": "text"}, [{}], ["a", 1], "a" * 300, "😀", "<|im_end|>"]  # fmt: skip


def broken(rng: random.Random, body: dict[str, Any]) -> dict[str, Any]:
    """A body with some of its places changed."""
    body = copy.deepcopy(body)
    for name in list(body):
        if name != "model" and rng.random() < 0.4:
            del body[name]
    for _ in range(rng.randint(0, 3)):
        node: Any = body
        while True:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            if not keys:
                break
            key = rng.choice(keys)
            inner = node[key]
            if isinstance(inner, dict | list) and inner and rng.random() < 0.75:
                node = inner
                continue
            match rng.randrange(5):
                case 0:
                    del node[key]
                case 1 if isinstance(node, dict):
                    node[rng.choice(["type", "role", "content", "name", "id", "extra", key])] = (
                        inner
                    )
                case 2:
                    node[key] = value(rng, 3)
                case 3 if isinstance(inner, str) and inner:
                    node[key] = inner[: rng.randrange(len(inner))] + rng.choice(
                        ["", "\udcff", "é", "\\"]
                    )
                case _:
                    node[key] = rng.choice(ODD)
            break
    return body


@contextlib.contextmanager
def bodies() -> Iterator[Check]:
    """Broken bodies to every route that takes one."""
    served = talk.make_served()
    api = Api(served=served, script=talk.speak("hm</think>ok"), max_body_bytes=1 << 20)
    with asyncio.Runner() as runner:
        client = api.client(raise_app_exceptions=True)

        def check(rng: random.Random) -> None:
            path = rng.choice(list(BODIES))
            body = broken(rng, BODIES[path])
            raw = json.dumps(body).encode()
            if rng.random() < 0.1:
                at = rng.randrange(len(raw))
                raw = raw[:at] + rng.randbytes(rng.randint(0, 4)) + raw[at + rng.randint(0, 4) :]
            headers = {"content-type": "application/json"}
            response = runner.run(client.post(path, content=raw, headers=headers))
            judge(path, raw, response)

        yield check
        runner.run(client.aclose())
    api.engine.wait_idle(10)
    api.close()


def judge(path: str, raw: bytes, response: httpx.Response) -> None:
    """Raises unless a response is one that a client can use."""
    where = (path, raw[:3000], response.text[:500])
    assert response.status_code in (200, 400, 404, 413, 503), where
    if response.status_code == 200:
        stream = response.headers["content-type"].startswith("text/event-stream")
        assert stream or isinstance(response.json(), dict), where
        return
    error = response.json()["error"]
    assert error["message"] and error["type"], where
    # A prompt that does not fit is about the conversation; anything else names a field.
    assert "param" not in error or error["param"] or response.status_code != 400 or error["code"], (
        where
    )
