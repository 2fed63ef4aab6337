"""A real small model behind a real server: calls that have to come do come, and fit."""

from __future__ import annotations

import json

import httpx
import jsonschema
import pytest

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city", "days", "unit"],
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "custom", "custom": {"name": "shell", "format": {
        "type": "grammar", "grammar": {"syntax": "regex", "definition": "(ls|cat|pwd)( [a-z]{1,8}){0,2}"}}}},
]  # fmt: skip
NAMED = {"type": "function", "function": {"name": "get_weather"}}
CUSTOM = {"type": "custom", "custom": {"name": "shell"}}


def calls(url: str, fields: dict, stream: bool) -> list[tuple[str, str]]:
    """(name, arguments or input) of the calls of an answer."""
    body = {"model": "smollm2", "tools": TOOLS, "stream": stream, "max_tokens": 300, **fields,
            "messages": [{"role": "user", "content": "What is the weather in Oslo tomorrow?"}]}  # fmt: skip
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=600)
    assert response.status_code == 200, response.text
    if not stream:
        (choice,) = response.json()["choices"]
        assert choice["finish_reason"] == "tool_calls", choice
        return [told(call) for call in choice["message"]["tool_calls"]]
    found: dict[int, list[str]] = {}
    for line in response.text.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                for delta in choice["delta"].get("tool_calls", ()):
                    name, text = told(delta)
                    each = found.setdefault(delta["index"], ["", ""])
                    each[0], each[1] = each[0] + name, each[1] + text
    return [(name, text) for name, text in found.values()]


def told(call: dict) -> tuple[str, str]:
    inner = call.get("function") or call["custom"]
    return inner.get("name") or "", inner.get("arguments") or inner.get("input") or ""


@pytest.mark.slow
@pytest.mark.parametrize("format", ["hermes", "qwen", "pythonic"])
def test_a_real_model_makes_the_calls_it_has_to(start, smollm2_path, tmp_path, format):
    """Required, named and custom, at temperature 0 and 1, whole and streamed alike."""
    settings = ("model.name=smollm2", f"model.answer_format={format}", "engine.context=1024")
    with start(smollm2_path, *settings, log_folder=tmp_path) as server:
        for choice in ("required", NAMED, CUSTOM):
            for temperature in (0, 1):
                fields = {"tool_choice": choice, "temperature": temperature, "seed": 3,
                          "parallel_tool_calls": False}  # fmt: skip
                ((name, text),) = calls(server.url, fields, False)
                if name == "get_weather":
                    jsonschema.validate(json.loads(text), WEATHER)
                    assert choice != CUSTOM
                else:
                    assert name == "shell" and text.split()[0] in ("ls", "cat", "pwd")
                    assert choice != NAMED
                assert calls(server.url, fields, True) == [(name, text)]
