"""LiteLLM: litellm_python.py URL"""

from __future__ import annotations

import json
import sys

import litellm
from say import CALL, HELLO, THOUGHT, run, weather

litellm.suppress_debug_info = True
OPENAI = {"model": "openai/toy", "api_base": sys.argv[1] + "/v1", "api_key": "none", "num_retries": 0}
ANTHROPIC = {"model": "anthropic/toy", "api_base": sys.argv[1], "api_key": "none", "max_tokens": 2000}
TOOLS = [{"type": "function", "function": weather("parameters")}]


def user(words: str) -> list:
    return [{"role": "user", "content": words}]


def whole_and_streamed() -> None:
    for way in (OPENAI, ANTHROPIC):
        message = litellm.completion(**way, messages=user("hello")).choices[0].message
        assert message.content == HELLO, message
        assert message.reasoning_content == THOUGHT, message
        chunks = litellm.completion(**way, messages=user("hello"), stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == HELLO, text


def tool_loop() -> None:
    for way in (OPENAI, ANTHROPIC):
        messages = user(CALL)
        for stream in (False, True):
            answer = litellm.completion(**way, messages=messages, tools=TOOLS, stream=stream)
            if stream:
                answer = litellm.stream_chunk_builder(list(answer), messages=messages)
            choice = answer.choices[0]
            assert choice.finish_reason == "tool_calls", choice
            (call,) = choice.message.tool_calls
            assert json.loads(call.function.arguments) == {"city": "Oslo"}
            result = {"role": "tool", "tool_call_id": call.id, "content": "7 degrees"}
            thread = [*messages, choice.message.model_dump(), result]
            final = litellm.completion(**way, messages=thread, tools=TOOLS)
            assert final.choices[0].message.content == "The tool says: 7 degrees"


def json_mode() -> None:
    answer = litellm.completion(
        **OPENAI, messages=user("Ada as JSON"), response_format={"type": "json_object"}
    )
    assert json.loads(answer.choices[0].message.content) == {"name": "Ada", "age": 36}


def responses() -> None:
    answer = litellm.responses(**OPENAI, input="hello")
    assert any(item.type == "message" and item.content[0].text == HELLO for item in answer.output)


def errors() -> None:
    try:
        litellm.completion(**OPENAI, messages=user("x"), temperature=9)
        raise AssertionError("no error")
    except litellm.BadRequestError as error:
        assert "temperature" in str(error)


run(whole_and_streamed, tool_loop, json_mode, responses, errors)
