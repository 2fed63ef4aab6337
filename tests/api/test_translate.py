"""Other surfaces' requests as chat requests: whatever is sent, a clear refusal or a chat request."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkjax.api import chat
from sparkjax.api.anthropic import request as messages
from sparkjax.api.errors import ApiError
from sparkjax.api.responses import request as responses
from sparkjax.api.translate import Translation

from . import toy

SERVED = toy.make_served()
WORDS = st.sampled_from(
    ["type", "role", "content", "text", "user", "assistant", "message", "function_call", "tool_use",
     "tool_result", "reasoning", "thinking", "input_text", "image", "source", "function", "custom",
     "name", "id", "call_id", "input", "output", "json_schema", "schema", "auto", "enabled", "low"]
)  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False) | WORDS | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=5),
    max_leaves=12,
)
FIELDS = {
    responses.parse: (
        {"model": "toy", "input": "hi"},
        ["input", "instructions", "previous_response_id", "max_output_tokens", "include", "tools", "tool_choice",
         "text", "reasoning", "store", "background", "stream", "stream_options", "metadata", "top_logprobs",
         "truncation", "parallel_tool_calls", "temperature", "conversation", "stop", "logit_bias"],
    ),
    messages.parse: (
        {"model": "toy", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]},
        ["messages", "system", "max_tokens", "stop_sequences", "temperature", "top_k", "tools", "tool_choice",
         "thinking", "output_config", "metadata", "stream", "container", "mcp_servers", "service_tier"],
    ),
}  # fmt: skip


def translated(parse: Any, body: dict[str, Any]) -> Translation:
    made = parse(body)
    return made if isinstance(made, Translation) else made.translation


@pytest.mark.parametrize("parse", FIELDS, ids=["responses", "messages"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_json_is_refused_by_name_or_becomes_a_chat_request(parse, data):
    fine, names = FIELDS[parse]
    given_fields = data.draw(st.dictionaries(st.sampled_from(names), JSON, max_size=3))
    body = fine | given_fields
    try:
        translation = translated(parse, body)
        try:
            chat.parse(translation.body, SERVED, 0)
        except ApiError as error:
            raise translation.named(error) from None
    except ApiError as error:
        assert error.status == 400 and error.param
        root = error.param.split(".")[0].split("[")[0]
        assert root in body, (error.param, error.message)


def test_names_lead_back_by_their_longest_known_beginning():
    made = Translation({}, {"messages[1]": "input[0]", "messages": "input", "messages[1].tool_calls[0]": "input[4]"})
    assert made.name("messages[1].content[2].text") == "input[0].content[2].text"
    assert made.name("messages[1].tool_calls[0].id") == "input[4].id"
    assert made.name("messages[12].role") == "input[12].role"
    assert made.name("temperature") == "temperature"
    error = made.named(ApiError(400, "messages[1].role is 5", param="messages[1].role", code="c"))
    assert error.message == "input[0].role is 5" and error.param == "input[0].role" and error.code == "c"
