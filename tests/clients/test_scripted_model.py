"""The scripted model itself, through the real server: what every client test stands on."""

from __future__ import annotations

import json

from tests.api.conftest import Api

from . import scripted

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def test_the_scripted_model_speaks_thinks_and_calls():
    api = Api(**scripted.options())
    try:
        message = api.chat("hello").json()["choices"][0]["message"]
        assert message["content"] == scripted.HELLO
        assert message["reasoning_content"] == scripted.THOUGHT
        ask = 'call weather with {"city": "Oslo"} and call weather with {"city": "Rome"}'
        choice = api.chat(ask, tools=TOOLS).json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        calls = [json.loads(c["function"]["arguments"]) for c in choice["message"]["tool_calls"]]
        assert calls == [{"city": "Oslo"}, {"city": "Rome"}]
        thread = [
            {"role": "user", "content": ask}, choice["message"],
            *({"role": "tool", "tool_call_id": c["id"], "content": "7 degrees"}
              for c in choice["message"]["tool_calls"]),
        ]  # fmt: skip
        body = {"model": "toy", "messages": thread, "tools": TOOLS}
        final = api.post("/v1/chat/completions", body).json()["choices"][0]
        assert final["message"]["content"] == "The tool says: 7 degrees"
        assert final["finish_reason"] == "stop"
    finally:
        api.close()
