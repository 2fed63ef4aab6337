"""DeepSeek's prompts, against what its publisher's encoder and another engine's give."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparkjax.text.deepseek import V4, V41, DeepSeekEncoder
from sparkjax.text.template import TemplateError, shield_messages
from sparkjax.text.thinking import probe
from sparkjax.text.tokenizer import SHIELD, Tokenizer
from sparkjax.text.vocabulary import Vocabulary

DATA = Path(__file__).resolve().parents[1] / "data" / "parsing"
CASES = [
    (name, dialect, case)
    for name, dialect in (("v4", V4), ("v41", V41))
    for case in json.loads((DATA / f"encode_deepseek_{name}.json").read_text())["cases"]
]
CONTROL = [
    "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜System｜>", "<｜User｜>", "<｜Assistant｜>",
    "<｜latest_reminder｜>", "<think>", "</think>", "｜DSML｜",
]  # fmt: skip


def tokenizer() -> Tokenizer:
    """Control tokens and bytes; ordinary text is never encoded here."""
    ids = frozenset(range(len(CONTROL)))
    return Tokenizer(
        Vocabulary(tuple(CONTROL), byte_level=True, literal=ids, special=ids, control=ids),
        None,  # type: ignore[arg-type]
        bos_id=0, eos_ids=[1], add_bos=False,
    )  # fmt: skip


def rendered(dialect, request: dict) -> str:
    messages = []
    for message in request["messages"]:
        message = {**message, "content": message.get("content") or ""}
        if isinstance(message["content"], list):
            message["content"] = "\n\n".join(part["text"] for part in message["content"])
        if message["role"] == "developer":
            message["role"] = "system"
        messages.append(message)
    choice, tools = request.get("tool_choice"), request.get("tools")
    if choice == "none":
        tools = None
    if isinstance(choice, dict):
        tools = [t for t in tools if t["function"]["name"] == choice["function"]["name"]]
        choice = "required"
    return DeepSeekEncoder(dialect).render(
        shield_messages(tokenizer(), messages, tags=False),
        tools=shield_messages(tokenizer(), tools, tags=False),
        enable_thinking=request.get("thinking", True),
        reasoning_effort=request.get("reasoning_effort"),
        drop_thinking=request.get("drop_thinking", True),
        tool_choice=choice,
        response_format=request.get("response_format"),
    )


@pytest.mark.parametrize(
    ("name", "dialect", "case"), CASES, ids=[f"{n}-{c['id']}" for n, _, c in CASES]
)
def test_equals_the_publisher_s_encoder(name, dialect, case):
    """The text, and which parts of it are control tokens."""
    if "error" in case:
        with pytest.raises(TemplateError):
            rendered(dialect, case["request"])
        return
    text = rendered(dialect, case["request"])
    plain = text.replace(SHIELD, "")
    assert plain in (case["prompt"], *case.get("also", []))
    if plain == case["prompt"] and "special" in case:
        found = [m.span() for m in tokenizer()._markup.finditer(text)]
        unshielded = [
            [a - text.count(SHIELD, 0, a), b - text.count(SHIELD, 0, b)] for a, b in found
        ]
        assert unshielded == case["special"]


@pytest.mark.parametrize(
    ("dialect", "tag"), [(V4, "<｜DSML｜tool_calls>\n"), (V41, "<｜DSML｜ calls>\n")]
)
def test_where_a_prompt_leaves_the_model(dialect, tag):
    encoder, ask = DeepSeekEncoder(dialect), [{"role": "user", "content": "x"}]
    go_on = [*ask, {"role": "assistant", "content": "", "reasoning_content": "r", "prefix": True}]
    tool = {"function": {"name": "f", "parameters": {}}}
    forced = encoder.render(ask, tools=[tool], enable_thinking=False, tool_choice="required")
    assert forced.endswith(tag) and encoder.start(forced) == "call"
    assert encoder.start(encoder.render(ask)) == "reasoning"
    assert encoder.start(encoder.render(go_on)) == "reasoning"
    assert encoder.start(encoder.render(ask, enable_thinking=False)) == "content"


def test_what_it_understands():
    thinking = probe(DeepSeekEncoder(V41))
    assert thinking.switch == "enable_thinking" and thinking.default and thinking.tags
    assert thinking.efforts["minimal"] == "low" and thinking.efforts["xhigh"] == "high"
    assert DeepSeekEncoder.of("llama") is None


@pytest.mark.parametrize("effort", [0, 101, "huge"])
def test_efforts_out_of_range_are_refused(effort):
    with pytest.raises(TemplateError, match="reasoning_effort"):
        DeepSeekEncoder(V41).render([{"role": "user", "content": "x"}], reasoning_effort=effort)


def test_calls_that_cannot_be_told_apart_are_refused():
    calls = [{"id": "a", "function": {"name": "f", "arguments": {}}}] * 2
    messages = [
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "r"},
    ]
    with pytest.raises(TemplateError, match="same id"):
        DeepSeekEncoder(V41).render(messages)


@pytest.mark.parametrize("required", [[1, "a"], 7])
def test_strict_tools_with_odd_schemas_are_refused(required):
    parameters = {"properties": {"a": {}}, "required": required}
    tool = {"function": {"name": "f", "strict": True, "parameters": parameters}}
    with pytest.raises(TemplateError, match="`required` does not name all"):
        DeepSeekEncoder(V41).render([{"role": "user", "content": "x"}], tools=[tool])
