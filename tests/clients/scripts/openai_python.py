"""The official OpenAI client for Python: openai_python.py URL"""

from __future__ import annotations

import json
import sys

import openai
from pydantic import BaseModel
from say import CALL, HELLO, THOUGHT, run, weather

client = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0, timeout=60)
MODEL = "toy"
TOOLS = [{"type": "function", "function": weather("parameters")}]
FLAT = [{"type": "function", **weather("parameters")}]


class Person(BaseModel):
    name: str
    age: int


def user(words: str) -> list:
    return [{"role": "user", "content": words}]


def chat_whole_and_streamed() -> None:
    whole = client.chat.completions.create(model=MODEL, messages=user("hello"))
    assert whole.choices[0].message.content == HELLO
    assert whole.choices[0].message.reasoning_content == THOUGHT
    text = thought = ""
    for chunk in client.chat.completions.create(
        model=MODEL, messages=user("hello"), stream=True, stream_options={"include_usage": True}
    ):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            thought += getattr(choice.delta, "reasoning_content", None) or ""
    assert (text, thought) == (HELLO, THOUGHT) and chunk.usage == whole.usage


def chat_tool_loop() -> None:
    messages = user(f"{CALL} and {CALL}")
    whole = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
    with client.chat.completions.stream(model=MODEL, messages=messages, tools=TOOLS) as stream:
        streamed = stream.get_final_completion()
    for answer in (whole, streamed):
        choice = answer.choices[0]
        assert choice.finish_reason == "tool_calls", choice
        calls = choice.message.tool_calls
        assert [json.loads(call.function.arguments) for call in calls] == [{"city": "Oslo"}] * 2
        assert len({call.id for call in calls}) == 2
        results = [{"role": "tool", "tool_call_id": call.id, "content": "7 degrees"} for call in calls]
        thread = [*messages, choice.message.model_dump(exclude_none=True), *results]
        final = client.chat.completions.create(model=MODEL, messages=thread, tools=TOOLS)
        assert final.choices[0].message.content == "The tool says: 7 degrees"
        assert final.choices[0].finish_reason == "stop"


def chat_parse() -> None:
    parsed = client.chat.completions.parse(
        model=MODEL, messages=user("Ada as JSON"), response_format=Person
    )
    assert parsed.choices[0].message.parsed == Person(name="Ada", age=36)


def responses_whole_and_streamed() -> None:
    whole = client.responses.create(model=MODEL, input="hello")
    assert whole.output_text == HELLO and whole.status == "completed"
    assert whole.output[0].type == "reasoning" and whole.output[0].content[0].text == THOUGHT
    assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens
    events = list(client.responses.create(model=MODEL, input="hello", stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.completed" and events[-1].response.output_text == HELLO
    deltas = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert deltas == HELLO
    with client.responses.stream(model=MODEL, input="hello") as stream:
        assert stream.get_final_response().output_text == HELLO


def responses_tool_loop() -> None:
    for whole in (True, False):
        if whole:
            first = client.responses.create(model=MODEL, input=CALL, tools=FLAT)
        else:
            with client.responses.stream(model=MODEL, input=CALL, tools=FLAT) as stream:
                first = stream.get_final_response()
        (call,) = [item for item in first.output if item.type == "function_call"]
        assert json.loads(call.arguments) == {"city": "Oslo"} and call.name == "weather"
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "7 degrees"}
        by_id = client.responses.create(
            model=MODEL, input=[result], tools=FLAT, previous_response_id=first.id
        )
        items = [item.model_dump(exclude_none=True) for item in first.output]
        by_items = client.responses.create(
            model=MODEL, tools=FLAT, store=False, input=[*user(CALL), *items, result]
        )
        assert by_id.output_text == by_items.output_text == "The tool says: 7 degrees"
        assert by_id.usage.input_tokens == by_items.usage.input_tokens


def responses_parse_and_store() -> None:
    parsed = client.responses.parse(model=MODEL, input="Ada as JSON", text_format=Person)
    assert parsed.output_parsed == Person(name="Ada", age=36)
    assert client.responses.retrieve(parsed.id).output_text == parsed.output_text
    assert client.responses.input_items.list(parsed.id).data[0].content[0].text == "Ada as JSON"
    client.responses.delete(parsed.id)
    try:
        client.responses.retrieve(parsed.id)
        raise AssertionError("it is still there")
    except openai.NotFoundError as error:
        assert error.code == "response_not_found"
    assert client.responses.input_tokens.count(model=MODEL, input="hello").input_tokens > 5


def responses_in_the_background() -> None:
    made = client.responses.create(model=MODEL, input="count", background=True)
    assert made.status in ("queued", "in_progress")
    cancelled = client.responses.cancel(made.id)
    assert cancelled.status == "cancelled"
    stream = client.responses.create(model=MODEL, input="hello", background=True, stream=True)
    events = []
    for event in stream:
        events.append(event)
        if event.type == "response.output_item.added":
            break
    stream.close()
    again = client.responses.retrieve(
        events[0].response.id, stream=True, starting_after=events[-1].sequence_number
    )
    events += list(again)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].response.output_text == HELLO


def errors() -> None:
    for call, kind in (
        (lambda: client.chat.completions.create(model=MODEL, messages=user("x"), temperature=9), openai.BadRequestError),
        (lambda: client.responses.create(model="other", input="x"), openai.NotFoundError),
        (lambda: client.responses.create(model=MODEL, input=[{"role": "user"}]), openai.BadRequestError),
    ):
        try:
            call()
            raise AssertionError("no error")
        except kind as error:
            assert error.param and error.code


def cancelling() -> None:
    stream = client.chat.completions.create(model=MODEL, messages=user("count"), stream=True)
    next(iter(stream))
    stream.close()
    stream = client.responses.create(model=MODEL, input="count", stream=True)
    next(iter(stream))
    stream.close()


run(
    chat_whole_and_streamed, chat_tool_loop, chat_parse, responses_whole_and_streamed,
    responses_tool_loop, responses_parse_and_store, responses_in_the_background, errors, cancelling,
)  # fmt: skip
