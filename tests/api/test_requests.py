"""Requests that are refused, and those that are not: parsing is a pure function."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkjax.api import body, chat, completions
from sparkjax.api.errors import ApiError
from sparkjax.api.served import SamplingDefaults, sampling_defaults

from . import toy
from .conftest import refused

SERVED = toy.make_served()
HELLO = [{"role": "user", "content": "hello"}]


def parse_chat(**fields):
    return chat.parse({"model": "toy", "messages": HELLO} | fields, SERVED, fresh_seed=7)


def parse_completion(**fields):
    return completions.parse({"model": "toy", "prompt": "hello"} | fields, SERVED, fresh_seed=7)


def error_of(call, *args, **fields) -> ApiError:
    with pytest.raises(ApiError) as caught:
        call(*args, **fields)
    return caught.value


def test_defaults_come_from_the_generation_config():
    options = parse_chat().options
    assert (options.sampling.temperature, options.sampling.top_p) == (0.7, 0.9)
    assert options.sampling.seed == 7  # fresh, since the request names none
    assert (options.n, options.max_tokens, options.stop_ids) == (1, None, (toy.END,))
    assert parse_completion().options.max_tokens == 16
    explicit = parse_chat(temperature=0, top_p=1.0, seed=-1).options.sampling
    assert (explicit.temperature, explicit.top_p, explicit.seed) == (0.0, 1.0, 2**64 - 1)


def test_generation_config_is_read_with_care():
    assert sampling_defaults({}) == SamplingDefaults(1.0, 1.0, 0, 0.0, 1.0)
    assert sampling_defaults({"temperature": 0.6, "top_k": -1}).top_k == 0
    assert sampling_defaults({"temperature": 0.6, "do_sample": False}).temperature == 0
    assert sampling_defaults({"temperature": None, "top_p": "x", "top_k": 64}).top_k == 64


WRONG = [
    ("temperature", -0.1), ("temperature", 2.1), ("temperature", "hot"), ("temperature", True),
    ("temperature", float("inf")), ("temperature", [1]), ("top_p", -0.1), ("top_p", 1.1),
    ("top_k", -2), ("top_k", 1.5), ("top_k", 2**31), ("min_p", -1), ("min_p", 1.01),
    ("presence_penalty", 2.1), ("presence_penalty", -2.1), ("frequency_penalty", 3),
    ("frequency_penalty", {}), ("repetition_penalty", 0), ("repetition_penalty", 101),
    ("seed", 2**63), ("seed", -(2**63) - 1), ("seed", 0.5), ("seed", "1"),
    ("n", 0), ("n", 129), ("n", -1), ("n", True), ("max_tokens", -1), ("max_tokens", 2**31),
    ("max_tokens", "9"), ("stop", ""), ("stop", 5), ("stop", "x" * 1025),
    ("stop", ["a", "b", "c", "d", "e"]), ("stop_token_ids", 5), ("stop_token_ids", [1] * 32),
    ("ignore_eos", 1), ("logit_bias", []), ("stream", "yes"), ("stream", 1),
    ("stream_options", []), ("user", 5), ("safety_identifier", "x" * 65), ("metadata", "x"),
    ("metadata", {str(i): "" for i in range(17)}), ("metadata", {"a": 1}), ("model", 5),
]  # fmt: skip


@pytest.mark.parametrize("field,value", WRONG)
@pytest.mark.parametrize("parse", [parse_chat, parse_completion])
def test_T51_invalid_values_name_the_field(parse, field, value):
    error = error_of(parse, **{field: value})
    assert (error.status, error.param) == (400, field), error.message
    assert error.message.startswith(field) and "allowed" in error.message


@pytest.mark.parametrize(
    "field,value,param",
    [
        ("stop", ["a", ""], "stop[1]"),
        ("stop", ["a", None], "stop[1]"),
        ("stop_token_ids", [1, 9999], "stop_token_ids[1]"),
        ("logit_bias", {"9999": 1}, "logit_bias"),
        ("logit_bias", {"-1": 1}, "logit_bias"),
        ("logit_bias", {"1": 101}, "logit_bias.1"),
        ("logit_bias", {"1": None}, "logit_bias.1"),
        ("logit_bias", {"1": 1, "01": 1}, "logit_bias"),
        ("logit_bias", {"²": 1}, "logit_bias"),
        ("stream_options", {"include_usage": True}, "stream_options"),
    ],
)
def test_T51_invalid_values_inside_fields(field, value, param):
    assert error_of(parse_chat, **{field: value}).param == param


def test_T51_chat_fields():
    assert error_of(parse_chat, max_tokens=0).param == "max_tokens"
    assert error_of(parse_chat, max_completion_tokens=0).param == "max_completion_tokens"
    assert error_of(parse_chat, max_tokens=1, max_completion_tokens=1).param == "max_tokens"
    assert error_of(parse_chat, logprobs=1).param == "logprobs"
    assert error_of(parse_chat, top_logprobs=2).param == "top_logprobs"
    assert error_of(parse_chat, top_logprobs=21, logprobs=True).param == "top_logprobs"
    assert parse_chat(top_logprobs=0).options.sampling.logprobs is None
    assert parse_chat(logprobs=True).options.sampling.logprobs == 0
    assert parse_chat(max_completion_tokens=5.0).options.max_tokens == 5


def test_T51_completion_fields():
    assert error_of(parse_completion, logprobs=True).param == "logprobs"
    assert error_of(parse_completion, logprobs=21).param == "logprobs"
    assert error_of(parse_completion, echo=1).param == "echo"
    assert parse_completion(logprobs=0).options.sampling.logprobs == 0


def test_T51_invalid_values_leave_the_engine_alone(api):
    for field, value in WRONG:
        if value != float("inf"):
            refused(api.complete(**{field: value}), 400, field)
    assert api.engine.calls["submit"] == 0
    assert api.chat().status_code == 200


@pytest.mark.parametrize(
    "prompt",
    ["", None, [], [""], [[]], ["a", ""], ["a", 5], [[1], "a", []], [1, "a"], [1, -1], [1.5], {}, 5,
     [len(toy.TOKENS)], [True], [[1], [9999]]],
)  # fmt: skip
def test_T50_empty_and_wrong_prompts(api, prompt):
    message = refused(api.complete(prompt), 400)
    assert message.startswith("prompt")
    assert api.complete("hello").status_code == 200


@pytest.mark.parametrize("messages", [None, [], {}, "hello", [None], ["hello"], [[]]])
def test_T50_empty_messages(api, messages):
    response = api.post("/v1/chat/completions", {"model": "toy", "messages": messages})
    assert refused(response, 400).startswith("messages")
    assert api.chat().status_code == 200


@pytest.mark.parametrize(
    "message,param",
    [
        ({}, "role"),
        ({"role": "robot", "content": "x"}, "role"),
        ({"role": "user"}, "content"),
        ({"role": "user", "content": None}, "content"),
        ({"role": "user", "content": []}, "content"),
        ({"role": "user", "content": 5}, "content"),
        ({"role": "user", "content": ["x"]}, "content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "content[0].text"),
        ({"role": "user", "content": [{"text": "x"}]}, "content[0].type"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "content[0].type"),
        ({"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}, "content[0].type"),
        ({"role": "assistant", "content": None}, "content"),
        ({"role": "assistant", "content": "x", "tool_calls": [{}]}, "tool_calls[0].function"),
        ({"role": "assistant", "content": "x", "audio": {}}, "audio"),
        ({"role": "assistant", "content": "x", "function_call": {}}, "function_call"),
        ({"role": "assistant", "content": "x", "refusal": {}}, "refusal"),
        ({"role": "tool", "content": "x"}, "tool_call_id"),
        ({"role": "user", "content": "x", "name": 5}, "name"),
    ],
)
def test_messages_are_checked_field_by_field(message, param):
    error = error_of(parse_chat, messages=[*HELLO, message])
    assert error.status == 400 and error.param == f"messages[1].{param}"


def test_messages_in_all_their_forms():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    found = parse_chat(
        messages=[
            {"role": "developer", "content": "d"},
            {"role": "user", "content": parts, "name": "Ada", "unknown": 1},
            {"role": "assistant", "content": None, "refusal": "no", "tool_calls": []},
            {"role": "assistant", "content": "y", "reasoning_content": "r", "tool_calls": None},
            {"role": "tool", "content": parts, "tool_call_id": "call_1"},
        ]
    ).messages
    assert found == (
        {"role": "system", "content": "d"},
        {"role": "user", "content": "ab", "name": "Ada"},
        {"role": "assistant", "content": "no"},
        {"role": "assistant", "content": "y", "reasoning_content": "r"},
        {"role": "tool", "content": "ab", "tool_call_id": "call_1"},
    )


NOT_YET = {
    "functions": [{"name": "f"}], "function_call": {"name": "f"},
    "chat_template": "{{ 1 }}", "modalities": ["text", "audio"], "audio": {}, "prediction": {},
    "best_of": 2, "suffix": "x", "use_beam_search": True, "min_tokens": 3, "bad_words": ["x"],
    "include_stop_str_in_output": True, "skip_special_tokens": False,
    "store": True, "web_search_options": {}, "cache_salt": "x",
    "continue_final_message": True,
}  # fmt: skip


@pytest.mark.parametrize("field", NOT_YET)
@pytest.mark.parametrize("parse", [parse_chat, parse_completion])
def test_what_is_not_supported_is_refused_by_name(parse, field):
    error = error_of(parse, **{field: NOT_YET[field]})
    assert (error.status, error.param, error.code) == (400, field, "unsupported_parameter")
    parse(**{field: None})


def test_neutral_values_of_unsupported_fields_pass():
    neutral = {
        "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "best_of": 1,
        "suffix": "", "modalities": ["text"], "store": False,
        "parallel_tool_calls": True, "chat_template_kwargs": {}, "min_tokens": 0,
        "skip_special_tokens": True,
    }  # fmt: skip
    assert parse_chat(**neutral) == parse_chat()
    assert parse_completion(**neutral) == parse_completion()
    # 1 is true in Python; in JSON it is not.
    assert error_of(parse_chat, store=0).param == "store"
    assert error_of(parse_chat, best_of=True).param == "best_of"


def test_fields_of_the_sister_endpoint_are_refused():
    assert error_of(parse_chat, prompt="x").param == "prompt"
    assert error_of(parse_chat, echo=True).param == "echo"
    assert error_of(parse_completion, messages=HELLO).param == "messages"
    assert error_of(parse_completion, max_completion_tokens=5).param == "max_completion_tokens"
    assert error_of(parse_completion, top_logprobs=5).param == "top_logprobs"


def test_unknown_fields_are_ignored():
    assert parse_chat(preserveThinking=True, **{"x" * 1000: {}}) == parse_chat()


def test_model_must_be_the_served_one():
    assert parse_chat(model="org/toy-alias")
    assert error_of(parse_chat, model=None).code == "missing_required_parameter"
    other = error_of(parse_chat, model="gpt-4")
    assert (other.status, other.code, other.param) == (404, "model_not_found", "model")


def test_stream_options():
    assert parse_chat(stream=True, stream_options={"include_usage": True}).options.include_usage
    assert not parse_chat(stream=True, stream_options={}).options.include_usage
    assert parse_chat(
        stream=True, stream_options={"continuous_usage_stats": True}
    ).options.continuous_usage
    parse_chat(stream=True, stream_options={"include_obfuscation": False, "other": None})
    error = error_of(parse_chat, stream=True, stream_options={"what": True})
    assert error.param == "stream_options.what"


def test_chunks_are_padded_on_request(api):
    stream = api.stream_chat(max_tokens=5, stream_options={"include_obfuscation": True})
    sizes = {
        len(line) - len("data: ") for line in stream.raw.split("\n\n") if "obfuscation" in line
    }
    assert all(len(chunk["obfuscation"]) >= 16 for chunk in stream.chunks[:-1])
    # JSON of the padding's own field, and of timings in the last chunk, comes on top.
    assert len({size % 128 for size in sizes}) <= 2
    assert "obfuscation" not in api.stream_chat(max_tokens=5).raw


def test_labels_come_back_with_a_whole_answer(api):
    answer = api.chat(metadata={"a": "b"}, service_tier="auto", max_tokens=1).json()
    assert answer["metadata"] == {"a": "b"} and answer["service_tier"] == "default"
    plain = api.chat(prompt_cache_key="k", prefix_cache=False, user="u", max_tokens=1).json()
    assert "metadata" not in plain and "service_tier" not in plain


@pytest.mark.parametrize(("fields", "param"), [
    ({"service_tier": "flex"}, "service_tier"), ({"prefix_cache": 1}, "prefix_cache"),
    ({"prompt_cache_key": 5}, "prompt_cache_key"), ({"sse_ping_interval": 5}, "sse_ping_interval"),
    ({"sse_ping_interval": 0, "stream": True}, "sse_ping_interval"),
    ({"sse_ping_interval": -2, "stream": True}, "sse_ping_interval"),
])  # fmt: skip
def test_extensions_are_checked(fields, param):
    assert error_of(parse_chat, **fields).param == param


def test_a_request_sets_its_own_keep_alive():
    assert parse_chat(stream=True, sse_ping_interval=7).options.ping == 7
    assert parse_chat(stream=True, sse_ping_interval=-1).options.ping == -1


def test_sampling_reaches_the_engine(api):
    fields = {
        "temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125, "presence_penalty": 1,
        "frequency_penalty": -1, "repetition_penalty": 1.5, "seed": 5, "n": 3, "max_tokens": 4,
        "logit_bias": {"65": -100, "66": 1.5}, "stop_token_ids": [10],
    }  # fmt: skip
    assert api.chat(**fields).status_code == 200
    first = api.engine.submitted[0]
    s = first.sampling
    assert (s.temperature, s.top_p, s.top_k, s.min_p) == (0.5, 0.25, 7, 0.125)
    assert (s.presence_penalty, s.frequency_penalty, s.repetition_penalty) == (1, -1, 1.5)
    assert s.logit_bias == ((65, -100.0), (66, 1.5)) and s.logprobs is None
    assert [each.sampling.seed for each in api.engine.submitted] == [5, 6, 7]
    assert first.stop_ids == (10, toy.END) and first.max_tokens == 4


def test_seed_is_fresh_where_none_is_given(api):
    api.chat(max_tokens=1)
    api.chat(max_tokens=1)
    seeds = [each.sampling.seed for each in api.engine.submitted]
    assert seeds[0] != seeds[1] and max(seeds) > 2**32


def test_seed_of_the_last_choice_wraps():
    options = parse_chat(seed=-1, n=2).options
    assert [options.sampling_of(i).seed for i in range(2)] == [2**64 - 1, 0]


def test_top_p_zero_keeps_the_top_candidate():
    sampling = parse_chat(top_p=0).options.sampling
    assert (sampling.top_p, sampling.top_k) == (1.0, 1)


def test_ignore_eos_leaves_only_the_request_s_own_stop_ids():
    assert parse_chat(ignore_eos=True, stop_token_ids=[3.0]).options.stop_ids == (3,)


BAD_BODIES = [
    b"", b"null", b"[]", b'"x"', b"{", b"{} {}", b'{"a": NaN}', b'{"a": Infinity}', b'{"a": -Infinity}',
    b"{'a': 1}", b"\xff\xfe{}", b'{"a": "\xff"}', b"\xef\xbb\xbf{}", b'{"a": ' + b"9" * 5000 + b"}",
    b'{"a":' * 65 + b"1" + b"}" * 65, b'{"a":' + b"[" * 64 + b"]" * 64 + b"}",
    b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", b"[" * 100_000, b'{"a":' * 100_000,
]  # fmt: skip


@pytest.mark.parametrize("raw", BAD_BODIES, ids=lambda raw: repr(raw[:16]))
def test_bodies_that_are_no_json_object(raw):
    error = error_of(body.parse, raw)
    assert (error.status, error.param, error.code) == (400, "body", "invalid_json")
    json.dumps(error.body())


def test_keys_may_come_once():
    for raw in (b'{"a": 1, "a": 1}', b'{"x": [{"b": {}, "b": {}}]}', b'{"a": 1, "\\u0061": 2}'):
        error = error_of(body.parse, raw)
        assert (error.status, error.code) == (400, "invalid_parameter") and "twice" in error.message


def test_depth_that_is_allowed():
    raw = b'{"a":' + b"[" * 63 + b"]" * 63 + b"}"
    assert body.parse(raw)["a"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
FIELDS = sorted(options for options in chat.KNOWN | completions.KNOWN | set(NOT_YET))


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4), st.booleans())
def test_any_json_is_parsed_or_refused(fields, talk):
    """No value of any field reaches the engine unchecked or ends in a crash."""
    try:
        (parse_chat if talk else parse_completion)(**fields)
    except ApiError as error:
        assert error.status in (400, 404) and error.param
        json.dumps(error.body()).encode()


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=64))
def test_any_bytes_are_parsed_or_refused(raw):
    try:
        assert isinstance(body.parse(raw), dict)
    except ApiError as error:
        assert error.status == 400
