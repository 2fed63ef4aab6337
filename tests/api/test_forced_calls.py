"""Calls that have to come, from the request's fields to the grammar that the engine is given."""

from __future__ import annotations

import pytest

from . import talk, toy
from .conftest import refused
from .test_tools import LIMITS, TOOLS

LARK = {"syntax": "lark", "definition": 'start: "ls" | "pwd"'}
REGEX = {"syntax": "regex", "definition": "ls|pwd"}


def custom(grammar: dict) -> dict:
    form = {"type": "grammar", "grammar": grammar}
    return {"type": "custom", "custom": {"name": "shell", "format": form}}


@pytest.fixture
def make(make_api):
    def make(text: str, source: str = talk.HERMES):
        served = talk.make_served(source)
        return make_api(served=served, script=talk.speak(text), limits=LIMITS)

    return make


def test_a_call_in_a_channel_is_forced_from_the_answer_s_beginning(make):
    """Messages of reasoning come before the call, and the grammar is about those too."""
    call = "commentary to=functions.get_weather <|constrain|>json<|message|>{}"
    api = make(f"<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>{call}<|call|>",
               talk.HARMONY)  # fmt: skip
    choice = api.chat(tools=TOOLS, tool_choice="required").json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    grammar = api.engine.submitted[-1].grammar
    assert grammar.after == "" and "commentary to=functions.get_weather" in grammar.source
    # Without tools a constraint is about the last message alone.
    assert api.chat(guided_regex="a").status_code == 200
    assert api.engine.submitted[-1].grammar.after == "<|channel|>final<|message|>"


def test_a_budget_of_reasoning_goes_on_to_the_forced_call(make_api):
    tokenizer = talk.make_tokenizer()
    thought = tokenizer.encode_rendered("<|channel|>analysis<|message|>" + "hmm " * 50)
    rest = "commentary to=functions.get_weather <|constrain|>json<|message|>{}<|call|>"
    close = tuple(tokenizer.encode_rendered("<|end|><|start|>assistant<|channel|>"))

    def script(submit):
        closed = submit.tokens[-len(close) :] == close
        return [*tokenizer.encode_rendered(rest), toy.END] if closed else thought

    api = make_api(served=talk.make_served(talk.HARMONY), script=script, limits=LIMITS)
    choice = api.chat(tools=TOOLS, tool_choice="required", thinking_budget=20).json()["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
    assert choice["message"]["reasoning_content"].startswith("hmm hmm")
    assert [s.grammar.after for s in api.engine.submitted] == ["", ""]


CHOICES = ["required", "auto", {"type": "custom", "custom": {"name": "shell"}}]


@pytest.mark.parametrize("choice", CHOICES, ids=["required", "auto", "named"])
def test_grammars_of_custom_tools_are_enforced(make, choice):
    api = make("fine", talk.GLM)
    for grammar in (LARK, REGEX):
        assert api.chat(tools=[custom(grammar)], tool_choice=choice).status_code == 200
        assert "pwd" in api.engine.submitted[-1].grammar.source
    wrong = custom({"syntax": "regex", "definition": "(a"})
    param = "tools" if choice == "auto" else "tool_choice"
    refused(api.chat(tools=[wrong], tool_choice=choice), 400, param, "invalid_grammar")


def test_a_lark_grammar_inside_json_is_told_and_not_enforced(make, caplog):
    api = make("fine")
    assert api.chat(tools=[custom(LARK)], tool_choice="required").status_code == 200
    assert "not enforced: shell.format" in caplog.text
    assert api.chat(tools=[custom(REGEX)], tool_choice="required").status_code == 200
    assert "^(?:ls|pwd)$" in api.engine.submitted[-1].grammar.source
