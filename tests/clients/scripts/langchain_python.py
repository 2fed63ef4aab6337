"""langchain-openai: langchain_python.py URL"""

from __future__ import annotations

import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from say import CALL, HELLO, run

CHAT = {"model": "toy", "base_url": sys.argv[1] + "/v1", "api_key": "none", "max_retries": 0}


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    return "7 degrees"


class Person(BaseModel):
    """Somebody."""

    name: str
    age: int


def models() -> list[ChatOpenAI]:
    return [ChatOpenAI(**CHAT), ChatOpenAI(**CHAT, use_responses_api=True)]


def whole_and_streamed() -> None:
    for model in models():
        assert model.invoke("hello").text == HELLO
        whole = None
        for chunk in model.stream("hello"):
            whole = chunk if whole is None else whole + chunk
        assert whole.text == HELLO


def tool_loop() -> None:
    for model in models():
        bound = model.bind_tools([weather])
        thread = [HumanMessage(CALL)]
        answer = bound.invoke(thread)
        (call,) = answer.tool_calls
        assert call["name"] == "weather" and call["args"] == {"city": "Oslo"}
        thread += [answer, ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])]
        assert bound.invoke(thread).text == "The tool says: 7 degrees"


def structured() -> None:
    for model in models():
        made = model.with_structured_output(Person, method="json_schema")
        assert made.invoke("Ada as JSON") == Person(name="Ada", age=36)


def counting() -> None:
    answer = ChatOpenAI(**CHAT).invoke("hello")
    usage = answer.usage_metadata
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] > 0


run(whole_and_streamed, tool_loop, structured, counting)
