"""Anthropic's client for Python: anthropic_python.py URL"""

from __future__ import annotations

import sys

import anthropic
from say import CALL, HELLO, THOUGHT, run, weather

client = anthropic.Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0, timeout=60)
ASK = {"model": "toy", "max_tokens": 2000}
TOOLS = [weather("input_schema")]


def user(words: str) -> list:
    return [{"role": "user", "content": words}]


def whole_and_streamed() -> None:
    whole = client.messages.create(**ASK, messages=user("hello"))
    assert [block.type for block in whole.content] == ["thinking", "text"]
    assert whole.content[0].thinking == THOUGHT and whole.content[1].text == HELLO
    assert whole.stop_reason == "end_turn"
    with client.messages.stream(**ASK, messages=user("hello")) as stream:
        assert "".join(stream.text_stream) == HELLO
        final = stream.get_final_message()
    assert final.content[0].thinking == THOUGHT and final.content[0].signature
    assert final.content[1].text == HELLO
    assert final.usage.output_tokens == whole.usage.output_tokens


def thinking_off() -> None:
    quiet = client.messages.create(**ASK, messages=user("hello"), thinking={"type": "disabled"})
    assert [block.type for block in quiet.content] == ["text"] and quiet.content[0].text == HELLO


def tool_loop() -> None:
    messages = user(f"{CALL} and {CALL}")
    whole = client.messages.create(**ASK, messages=messages, tools=TOOLS)
    with client.messages.stream(**ASK, messages=messages, tools=TOOLS) as stream:
        streamed = stream.get_final_message()
    for answer in (whole, streamed):
        assert answer.stop_reason == "tool_use"
        calls = [block for block in answer.content if block.type == "tool_use"]
        assert [call.input for call in calls] == [{"city": "Oslo"}] * 2
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": "7 degrees"} for call in calls
        ]
        content = [block.model_dump(exclude_none=True) for block in answer.content]
        thread = [
            *messages,
            {"role": "assistant", "content": content},
            {"role": "user", "content": results},
        ]
        final = client.messages.create(**ASK, messages=thread, tools=TOOLS)
        assert final.content[-1].text == "The tool says: 7 degrees"
        assert final.stop_reason == "end_turn"


def stop_sequences_and_limits() -> None:
    stopped = client.messages.create(**ASK, messages=user("hello"), stop_sequences=["help"])
    assert stopped.stop_reason == "stop_sequence" and stopped.stop_sequence == "help"
    assert stopped.content[-1].text == HELLO.split("help")[0]
    cut = client.messages.create(model="toy", max_tokens=5, messages=user("hello"))
    assert cut.stop_reason == "max_tokens"


def counting() -> None:
    count = client.messages.count_tokens(model="toy", messages=user("hello"), tools=TOOLS)
    usage = client.messages.create(**ASK, messages=user("hello"), tools=TOOLS).usage
    assert count.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def models() -> None:
    found = [model.id for model in client.models.list()]
    assert found == ["toy", "org/toy-alias"], found
    assert client.models.retrieve("toy").display_name == "toy"


def errors() -> None:
    for call, kind in (
        (lambda: client.messages.create(model="toy", max_tokens=0, messages=user("x")), anthropic.BadRequestError),
        (lambda: client.messages.create(model="other", max_tokens=1, messages=user("x")), anthropic.NotFoundError),
    ):
        try:
            call()
            raise AssertionError("no error")
        except kind as error:
            assert error.body["error"]["type"] and error.request_id


def cancelling() -> None:
    with client.messages.stream(**ASK, messages=user("count")) as stream:
        next(iter(stream.text_stream))


run(whole_and_streamed, thinking_off, tool_loop, stop_sequences_and_limits, counting, models, errors, cancelling)
