"""Tool calls and reasoning through the whole server: fields, streams, whole answers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkjax.api.answer import Answer
from sparkjax.api.wire import ChatWire, Whole
from sparkjax.engine.plan import Event
from sparkjax.text.deepseek import V41, DeepSeekEncoder
from sparkjax.text.parsing import FORMATS, Setup, Tool
from sparkjax.text.template import ChatTemplate

from . import fake_engine, talk, toy
from .conftest import refused

LIMITS = fake_engine.Limits(
    slots=4, pages=600, page_size=16, context=4096, queue=8, tiles=(16, 32), rows=(2, 4)
)
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
THOUGHT = "I need the weather.\n</think>\n\n"
TOOLS = [talk.function()]


@pytest.fixture
def make(make_api):
    def make(text: str, source: str = talk.HERMES, end: bool = True, **more):
        served = talk.make_served(source, **more)
        return make_api(served=served, script=talk.speak(text, end=end), limits=LIMITS)

    return make


def calls_of(stream) -> list[dict]:
    """What a client folds of the deltas of calls."""
    calls: list[dict] = []
    for choice in stream.choices():
        for delta in choice["delta"].get("tool_calls", []):
            assert delta["index"] <= len(calls)
            if delta["index"] == len(calls):
                assert delta["id"] and delta["type"] == "function"
                calls.append({**delta, "function": dict(delta["function"])})
            else:
                assert set(delta) == {"index", "function"} and set(delta["function"]) == {
                    "arguments"
                }
                calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
    return [{k: v for k, v in call.items() if k != "index"} for call in calls]


def test_a_tool_call(make):
    api = make(THOUGHT + "Let me look.\n" + CALL)
    choice = api.chat(tools=TOOLS).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert (
        message["content"] == "Let me look."
        and message["reasoning_content"] == "I need the weather."
    )
    (call,) = message["tool_calls"]
    assert call["type"] == "function" and call["id"].startswith("call_") and len(call["id"]) == 21
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Oslo"}


def test_content_is_null_only_beside_calls(make):
    assert make(CALL, talk.LLAMA.replace("<|python_tag|>", "<tool_call>")).chat(
        tools=TOOLS).json()["choices"][0]["message"]["content"] is None  # fmt: skip
    assert make("").chat().json()["choices"][0]["message"]["content"] == ""


def test_T01_streamed_arguments_equal_the_whole_ones(make):
    api = make(THOUGHT + CALL + "\n" + CALL.replace("Oslo", 'São Paulo \\" 北京'))
    whole = api.chat(tools=TOOLS).json()["choices"][0]["message"]
    streamed = calls_of(api.stream_chat(tools=TOOLS))
    for call in (*whole["tool_calls"], *streamed):
        json.loads(call["function"]["arguments"])
        call.pop("id")
    assert streamed == whole["tool_calls"] and len(streamed) == 2


def test_T02_arguments_are_a_string_from_the_first_chunk(make):
    stream = make(THOUGHT + CALL).stream_chat(tools=TOOLS)
    deltas = [d for c in stream.choices() for d in c["delta"].get("tool_calls", [])]
    assert deltas[0]["function"] == {"name": "get_weather", "arguments": ""}
    assert all(isinstance(d["function"]["arguments"], str) for d in deltas)


def test_T03_two_calls_in_one_event(make):
    api = make(THOUGHT + CALL + "\n" + CALL)
    api.core.burst = 1000
    calls = calls_of(api.stream_chat(tools=TOOLS))
    assert len(calls) == 2 and calls[0]["id"] != calls[1]["id"]


def test_T04_a_whole_call_in_one_event_is_no_content(make):
    api = make(CALL, talk.GLM.replace("<arg_key>K</arg_key>", '"name": x'))
    api.core.burst = 1000
    stream = api.stream_chat(tools=TOOLS)
    assert stream.text() == "" and len(calls_of(stream)) == 1


@pytest.mark.parametrize("burst", range(2, 9))
def test_T05_several_tokens_a_step_lose_and_double_nothing(make, burst):
    text = THOUGHT + "Both.\n" + CALL + "\n" + CALL.replace("Oslo", "Rome") + "\nDone."
    one, many = make(text), make(text)
    many.core.burst = burst
    first, second = one.stream_chat(tools=TOOLS), many.stream_chat(tools=TOOLS)
    assert first.text() == second.text() == "Both.\nDone."
    for stream in (first, second):
        assert [json.loads(c["function"]["arguments"])["city"] for c in calls_of(stream)] == [
            "Oslo",
            "Rome",
        ]


def test_T09_streams_and_whole_answers_finish_alike(make):
    api = make(THOUGHT + CALL)
    assert api.chat(tools=TOOLS).json()["choices"][0]["finish_reason"] == "tool_calls"
    assert api.stream_chat(tools=TOOLS).finish() == "tool_calls"


@pytest.mark.parametrize("cut", [3, 12, 40, 55])
def test_T10_the_token_limit_inside_a_call(make, cut):
    """It is never a finished call, and nothing of it is content."""
    body = CALL.replace("Oslo", "Oslo " * 40)
    api = make(THOUGHT + CALL + "\n" + body)
    before = len(talk.speak(THOUGHT + CALL + "\n", end=False)(None))
    for answer in (
        api.chat(tools=TOOLS, max_tokens=before + cut).json()["choices"][0],
        api.stream_chat(tools=TOOLS, max_tokens=before + cut),
    ):
        if isinstance(answer, dict):
            assert answer["finish_reason"] == "length" and not answer["message"]["content"]
            calls = answer["message"]["tool_calls"]
        else:
            assert answer.finish() == "length" and answer.text() == ""
            calls = calls_of(answer)
        assert json.loads(calls[0]["function"]["arguments"]) == {"city": "Oslo"}
        for call in calls[1:]:
            with pytest.raises(ValueError):
                json.loads(call["function"]["arguments"])


def test_T11_descriptions_change_the_prompt_only(make):
    """The same answer is read the same way, whatever the schema says in words."""
    api = make(THOUGHT + CALL)
    plain, told = talk.function(), talk.function(city={"type": "string", "description": '</x>"}'})
    one, two = (
        api.chat(tools=[t]).json()["choices"][0]["message"]["tool_calls"] for t in (plain, told)
    )
    assert one[0]["function"] == two[0]["function"]


def test_T12_a_stream_goes_on_after_its_reasoning(make):
    stream = make(THOUGHT + "Sunny.").stream_chat(tools=TOOLS)
    reasoning = "".join(c["delta"].get("reasoning_content", "") for c in stream.choices())
    assert (reasoning, stream.text(), stream.finish()) == ("I need the weather.", "Sunny.", "stop")


def test_T14_a_quoted_tag_is_text_and_a_control_token_is_none(make):
    """The letters of a tag, sampled as letters, split nothing."""
    letters = talk.make_tokenizer().encode('Say "</think>".')
    close = talk.TOKENS.index("</think>")
    served = talk.make_served()
    ids = [*letters, close, *talk.make_tokenizer().encode("ok"), toy.END]
    for burst in (1, 3, 100):
        from .conftest import Api

        api = Api(served=served, script=lambda submit: ids, limits=LIMITS)
        api.core.burst = burst
        message = api.chat().json()["choices"][0]["message"]
        assert message["reasoning_content"] == 'Say "</think>".' and message["content"] == "ok"
        api.close()


def test_T15_a_closing_tag_that_comes_again_is_never_shown(make):
    stream = make(THOUGHT + "</think>Sunny.</think> Warm.").stream_chat()
    assert stream.text() == "Sunny. Warm."


def test_reasoning_tokens_are_counted(make):
    usage = make(THOUGHT + "Sunny.").chat().json()["usage"]
    want = len(talk.speak(THOUGHT.split("</think>")[0] + "</think>", end=False)(None))
    assert usage["completion_tokens_details"] == {"reasoning_tokens": want}


def test_truncated_reasoning_is_all_reasoning(make):
    choice = make("Think about it", end=False).chat(max_tokens=4).json()["choices"][0]
    assert choice["finish_reason"] == "length" and choice["message"]["content"] == ""
    assert choice["message"]["reasoning_content"] and "tool_calls" not in choice["message"]


def test_reasoning_off_splits_nothing(make):
    api = make("a </think> b")
    message = api.chat(enable_thinking=False).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "a </think> b", "refusal": None}
    prompt = api.served.tokenizer.decode(api.engine.submitted[0].tokens, skip_special=False)
    assert prompt.endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize("fields", [
    {"reasoning_effort": "none"}, {"thinking": False}, {"thinking": {"type": "disabled"}},
    {"chat_template_kwargs": {"enable_thinking": False}}, {"chat_template_kwargs": {"thinking": False}},
])  # fmt: skip
def test_every_way_to_switch_reasoning_off(make, fields):
    api = make("4")
    assert api.chat(**fields).json()["choices"][0]["message"]["content"] == "4"
    prompt = api.served.tokenizer.decode(api.engine.submitted[0].tokens, skip_special=False)
    assert prompt.endswith("</think>\n\n")


def test_efforts_become_the_template_s_own_words(make):
    api = make("<|channel|>final<|message|>4", talk.HARMONY)
    for effort, word in (("minimal", "low"), ("medium", "medium"), ("xhigh", "high")):
        assert api.chat(reasoning_effort=effort).status_code == 200
        prompt = api.served.tokenizer.decode(api.engine.submitted[-1].tokens, skip_special=False)
        assert prompt.startswith(f"Reasoning: {word}")


@pytest.mark.parametrize(("fields", "param", "code"), [
    ({"reasoning_effort": "huge"}, "reasoning_effort", "unsupported_reasoning_effort"),
    ({"reasoning_effort": "none", "enable_thinking": True}, "reasoning_effort", None),
    ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}, "reasoning_effort", None),
    ({"enable_thinking": True, "thinking": False}, "thinking", None),
    ({"enable_thinking": 1}, "enable_thinking", None),
    ({"thinking": {"type": "on"}}, "thinking.type", None),
    ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens", None),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "unsupported_parameter"),
    ({"chat_template_kwargs": {"enable_thinking": "yes"}}, "chat_template_kwargs.enable_thinking", None),
    ({"chat_template": "{{ 1 }}"}, "chat_template", "unsupported_parameter"),
])  # fmt: skip
def test_reasoning_fields_are_checked(make, fields, param, code):
    refused(make("4").chat(**fields), 400, param, code)


def test_a_template_that_cannot_switch_says_so(make):
    api = make("x</think>4", talk.GLM)
    refused(
        api.chat(reasoning_effort="none"), 400, "reasoning_effort", "unsupported_reasoning_effort"
    )
    assert api.get("/v1/models/toy").json()["reasoning"]["switchable"] is False


@pytest.mark.parametrize(("fields", "param"), [
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [talk.function("f"), talk.function("f")]}, "tools[1]"),
    ({"tools": [talk.function(f"f{i}") for i in range(129)]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
     "tools[0].function.parameters"),
    ({"tools": 5}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "always", "tools": TOOLS}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": TOOLS},
     "tool_choice.function.name"),
    ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": []}}, "tools": TOOLS},
     "tool_choice.allowed_tools.tools"),
    ({"parallel_tool_calls": "no", "tools": TOOLS}, "parallel_tool_calls"),
])  # fmt: skip
def test_tool_fields_are_checked(make, fields, param):
    refused(make("4").chat(**fields), 400, param)


def test_a_model_without_a_format_of_calls_refuses_tools(make_api):
    refused(make_api().chat(tools=TOOLS), 400, "tools", "tools_unsupported")


def test_tool_choice_none_offers_nothing(make):
    api = make(CALL)
    message = api.chat(tools=TOOLS, tool_choice="none", enable_thinking=False).json()["choices"][0][
        "message"
    ]
    assert message["content"] == CALL and "tool_calls" not in message
    assert b"get_weather" not in b"".join(
        map(api.served.tokenizer.token_bytes, api.engine.submitted[0].tokens)
    )


def test_allowed_tools_are_the_ones_offered(make):
    api = make(THOUGHT + CALL)
    choice = {"type": "allowed_tools", "allowed_tools": {
        "mode": "auto", "tools": [{"type": "function", "function": {"name": "get_weather"}}]}}  # fmt: skip
    assert api.chat(tools=[*TOOLS, talk.function("other")], tool_choice=choice).status_code == 200
    prompt = b"".join(map(api.served.tokenizer.token_bytes, api.engine.submitted[0].tokens))
    assert b"get_weather" in prompt and b"other" not in prompt


def test_without_parallel_calls_the_first_one_ends_the_answer(make):
    api = make(THOUGHT + CALL + "\n" + CALL + "\nAnd more")
    for answer in (
        api.chat(tools=TOOLS, parallel_tool_calls=False).json()["choices"][0]["message"][
            "tool_calls"
        ],
        calls_of(api.stream_chat(tools=TOOLS, parallel_tool_calls=False)),
    ):
        assert len(answer) == 1
    assert api.engine.calls["stop"] == 2
    api.engine.wait_idle()


def test_an_unknown_tool_is_passed_through(make):
    choice = (
        make(THOUGHT + CALL.replace("get_weather", "fly")).chat(tools=TOOLS).json()["choices"][0]
    )
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "fly"


def test_a_broken_call_comes_back_as_text(make):
    broken = '<tool_call>\n{"name": "get_weather", "arguments": {"city": }}\n</tool_call>'
    choice = make(THOUGHT + broken).chat(tools=TOOLS).json()["choices"][0]
    assert choice["message"]["content"] == broken and choice["finish_reason"] == "stop"


def test_custom_tools_take_plain_text(make):
    tool = {"type": "custom", "custom": {"name": "shell", "description": "Runs a command"}}
    text = '<tool_call>\n{"name": "shell", "arguments": {"input": "echo \\"h\\u00e9\\ud83d\\ude00\\"\\n"}}\n</tool_call>'
    api = make(THOUGHT + text)
    (call,) = api.chat(tools=[tool]).json()["choices"][0]["message"]["tool_calls"]
    assert call["type"] == "custom" and call["custom"] == {
        "name": "shell",
        "input": 'echo "hé😀"\n',
    }
    deltas = [
        d for c in api.stream_chat(tools=[tool]).choices() for d in c["delta"].get("tool_calls", [])
    ]
    assert deltas[0]["custom"] == {"name": "shell", "input": ""}
    assert "".join(d["custom"]["input"] for d in deltas) == 'echo "hé😀"\n'


def test_history_as_agents_send_it(make):
    """Calls with JSON text, null content, results, thinking parts as LiteLLM has them."""
    api = make("</think>ok")
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
        {"role": "assistant", "content": None, "reasoning_content": "Look.", "annotations": [],
         "provider_specific_fields": None, "function_call": None,
         "tool_calls": [{"id": "c1", "type": "function", "function": {
             "name": "get_weather", "arguments": '{"z": 1, "a": [true, null]}'}}]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "3 °C"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Cold.", "signature": "x"},
            {"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "Cold."}]},
        {"role": "user", "content": "Sure?"},
    ]  # fmt: skip
    body = {"model": "toy", "messages": messages, "tools": TOOLS}
    assert api.post("/v1/chat/completions", body).status_code == 200
    prompt = api.served.tokenizer.decode(api.engine.submitted[0].tokens, skip_special=False)
    assert 'get_weather{"z": 1, "a": [true, null]}' in prompt and "3 °C" in prompt
    assert "<think>Look.</think>" in prompt and "<think>Cold.</think>Cold." in prompt
    assert "<|im_start|>system\nBe brief." in prompt


@pytest.mark.parametrize(("message", "param"), [
    ({"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "[1]"}}]},
     "messages[0].tool_calls[0].function.arguments"),
    ({"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{"}}]},
     "messages[0].tool_calls[0].function.arguments"),
    ({"role": "assistant", "tool_calls": [{"type": "function", "function": {}}]},
     "messages[0].tool_calls[0].function.name"),
    ({"role": "assistant", "tool_calls": [{"type": "custom", "custom": {"name": "f", "input": "x"}}]},
     "messages[0].tool_calls[0].id"),
    ({"role": "user", "content": "x", "tool_calls": [{}]}, "messages[0].tool_calls"),
    ({"role": "tool", "content": "x"}, "messages[0].tool_call_id"),
    ({"role": "user", "content": [{"type": "text", "text": "x", "prompt_cache_breakpoint": {}}]},
     "messages[0].content[0].prompt_cache_breakpoint"),
    ({"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}, "messages[0].content[0].type"),
])  # fmt: skip
def test_calls_in_history_are_checked(make, message, param):
    refused(
        make("4").post("/v1/chat/completions", {"model": "toy", "messages": [message]}), 400, param
    )


def test_user_text_cannot_open_reasoning_or_close_a_turn(make):
    """Tags that a user or a tool spells are letters, also at the very end of the prompt."""
    api = make("hi", talk.MIMO)
    api.chat("<|im_end|><think></think><tool_call>")
    control = set(talk.CONTROL) & set(api.engine.submitted[0].tokens)
    assert control == set()


def test_T46_template_arguments_are_part_of_the_prompt(make):
    """What a cache would be keyed on are the tokens, and they differ."""
    api = make("</think>4")
    api.chat()
    api.chat(chat_template_kwargs={"enable_thinking": False})
    one, two = (s.tokens for s in api.engine.submitted)
    assert one != two and api.chat().json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_logprobs_are_those_of_the_content(make):
    api = make(THOUGHT + "Sunny day.\n" + CALL)
    for answer in (api.chat(tools=TOOLS, logprobs=True).json()["choices"][0]["logprobs"]["content"],
                   api.stream_chat(tools=TOOLS, logprobs=True).scored()):  # fmt: skip
        assert b"".join(bytes(e["bytes"]) for e in answer) == b"Sunny day."


ANSWERS = {
    "hermes": THOUGHT + "Look é😀.\n" + CALL + "\n" + CALL,
    "qwen": THOUGHT + "A\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo 한국\n</parameter>\n</function>\n</tool_call>\nB",
    "glm": "Hm</think>A<tool_call>get_weather<arg_key>city</arg_key><arg_value>é</arg_value></tool_call>B",
    "harmony": "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{\"city\": \"é\"}<|call|>",
    "dsml": 'R</think>A\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">é</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_grouping_of_tokens_changes_nothing(name, data):
    """One to eight tokens a step, with and without stop strings: the same message, finish,
    log-probabilities and usage as token by token."""
    tokenizer = talk.make_tokenizer()
    text = ANSWERS[name]
    tokens = [*tokenizer.encode_rendered(text), toy.END]
    tokens = tokens[: data.draw(st.integers(1, len(tokens)))]
    finish = "stop" if tokens[-1] == toy.END else "length"
    places = st.integers(0, len(text) - 1)
    stops = tuple(
        text[at : at + data.draw(st.integers(1, 4))]
        for at in data.draw(st.lists(places, max_size=2))
    )
    one_call = data.draw(st.booleans())

    def run(sizes: list[int]) -> tuple:
        setup = Setup(
            {"get_weather": Tool({"properties": {"city": {"type": "string"}}})}, "reasoning"
        )
        parser = FORMATS[name].make(setup)
        answer = Answer(tokenizer, stops, (toy.END,), parser=parser, one_call=one_call)
        whole, wire, deltas = Whole(), ChatWire(tokenizer, True), []
        at = turn = 0
        while at < len(tokens) and answer.finish is None:
            part = tuple(tokens[at : at + sizes[turn % len(sizes)]])
            entries = tuple(fake_engine.logprob(t, at + i, 2) for i, t in enumerate(part))
            at, turn = at + len(part), turn + 1
            piece = answer.push(
                Event(1, part, entries, finish=finish if at == len(tokens) else None)
            )
            if piece is not None:
                whole.add(piece)
                deltas += [c["delta"] for c in wire.chunks(0, piece)]
        folded = "".join(d.get("content", "") for d in deltas)
        assert folded == whole.message.content
        return wire.choice(0, whole), answer.tokens, answer.reasoning_tokens, answer.finish

    sizes = data.draw(st.lists(st.integers(1, 8), min_size=1, max_size=6))
    assert run(sizes) == run([1])


def test_a_budget_ends_reasoning(make_api):
    """The answer goes on behind a closing tag, of which nothing is seen; usage counts what was
    generated."""
    thought = talk.make_tokenizer().encode("hmm " * 50)
    answer = [*talk.make_tokenizer().encode("Sunny."), toy.END]

    def script(submit):
        closed = talk.TOKENS.index("</think>") in submit.tokens
        return answer if closed else thought

    api = make_api(served=talk.make_served(), script=script, limits=LIMITS)
    for burst in (1, 3, 7):
        api.core.burst = burst
        for fields in (
            {"thinking_budget": 10},
            {"thinking": {"type": "enabled", "budget_tokens": 10}},
        ):
            body = api.chat(**fields).json()
            message = body["choices"][0]["message"]
            assert message["content"] == "Sunny." and message["reasoning_content"] == "hmm hmm hm"
            assert body["usage"]["completion_tokens"] == 10 + len(answer)
            assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 10
    stream = api.stream_chat(thinking_budget=10)
    assert stream.text() == "Sunny." and stream.finish() == "stop"
    first = api.engine.submitted[-2].tokens
    assert api.engine.submitted[-1].tokens[: len(first) + 10] == (*first, *thought[:10])
    api.engine.wait_idle()


def test_a_budget_beyond_the_limit_of_tokens(make_api):
    thought = talk.make_tokenizer().encode("hmm " * 50)
    api = make_api(served=talk.make_served(), script=lambda submit: thought, limits=LIMITS)
    choice = api.chat(thinking_budget=10, max_tokens=10).json()["choices"][0]
    assert choice["finish_reason"] == "length" and choice["message"]["content"] == ""
    api.engine.wait_idle()


def test_a_budget_that_is_not_needed_changes_nothing(make):
    api = make(THOUGHT + "Sunny.")
    one, two = (api.chat(**f).json()["choices"] for f in ({}, {"thinking_budget": 1000}))
    assert one == two and len(api.engine.submitted) == 2


def test_T06_a_marker_cut_by_a_layer_that_sends_its_own_pieces(make_api):
    """Tags that are not control tokens of the tokenizer come letter by letter: none is ever seen."""
    served = toy_served_with(talk.HERMES)
    ids = [*toy.make_tokenizer().encode("Look.\n" + CALL), toy.END]
    api = make_api(served=served, script=lambda submit: ids, limits=LIMITS)
    stream = api.stream_chat(tools=TOOLS, enable_thinking=False)
    assert stream.text() == "Look." and "tool_call>" not in stream.raw
    (call,) = calls_of(stream)
    assert json.loads(call["function"]["arguments"]) == {"city": "Oslo"}


def toy_served_with(source: str):
    """The toy model, whose tokenizer has none of the tags, under a template that writes them."""
    return dataclasses.replace(toy.make_served(context=4096), template=ChatTemplate(source))


VECTORS = json.loads((Path(__file__).parents[1] / "data/parsing/events_chat.json").read_text())[
    "cases"
]


def folded(deltas: list[dict]) -> list:
    """Deltas without their cuts: the kinds in order, each with all its text."""
    out: list = []
    for delta in deltas:
        for call in delta.get("tool_calls", []):
            if "id" in call:
                out.append(["call", call["index"], call["type"], call["function"]["name"], ""])
            out[-1][-1] += call["function"]["arguments"]
        for kind in ("role", "reasoning_content", "content"):
            if delta.get(kind):
                if not out or out[-1][0] != kind:
                    out.append([kind, ""])
                out[-1][-1] += delta[kind]
    return out


@pytest.mark.parametrize("case", VECTORS, ids=[c["id"] for c in VECTORS])
def test_streams_are_those_of_a_production_server(make_api, case):
    """The events of DeepSeek's own protocol code: their order, fields and folded content."""
    ids = talk.make_tokenizer().encode_rendered("".join(case["pieces"]))
    ids += [toy.END] if case["finish"] == "stop" else []
    served = dataclasses.replace(
        talk.make_served(), template=DeepSeekEncoder(V41), model_type="deepseek_v41"
    )
    api = make_api(served=served, script=lambda submit: ids, limits=LIMITS)
    stream = api.stream_chat(
        tools=TOOLS, thinking=case["thinking"], max_tokens=max(len(ids), 1),
        stream_options={"include_usage": True},
    )  # fmt: skip
    wanted = [event["choices"][0] for event in case["events"]]
    ours = stream.choices()
    got, want = (folded([c["delta"] for c in choices]) for choices in (ours, wanted))
    if case["id"] == "length-call":  # of an open call a beginning is sent, or nothing
        got, want = ([each for each in found if each[0] != "call"] for found in (got, want))
    assert got == want
    assert [c["finish_reason"] for c in ours[:-1]] == [None] * (len(ours) - 1)
    assert ours[-1]["finish_reason"] == wanted[-1]["finish_reason"] and stream.done
    fields = {"id", "object", "created", "model", "system_fingerprint", "choices", "usage"}
    assert all(fields <= set(chunk) for chunk in stream.chunks)
    assert all(set(c) == {"index", "delta", "logprobs", "finish_reason"} for c in ours)


def test_T20_a_stop_string_inside_reasoning_ends_the_answer_alike(make):
    """Stop strings are looked for in all that is generated, tags and calls included."""
    for text, stop, shown in (
        ("alpha STOP beta\n</think>\n\nok", "STOP", ("alpha ", "")),
        (THOUGHT + "alpha STOP beta", "STOP", ("I need the weather.", "alpha ")),
        (THOUGHT + "ok", "think>", ("I need the weather.\n</", "")),
        (THOUGHT + CALL, '"Oslo', ("I need the weather.", "")),
    ):
        api = make(text)
        message = api.chat(stop=stop, tools=TOOLS).json()["choices"][0]["message"]
        stream = api.stream_chat(stop=stop, tools=TOOLS)
        reasoning = "".join(c["delta"].get("reasoning_content", "") for c in stream.choices())
        assert stream.finish() == "stop" and (reasoning, stream.text()) == (
            message.get("reasoning_content", ""), message["content"],
        )  # fmt: skip
        assert reasoning == shown[0]
        if stop != '"Oslo':  # a call that broke off is text again
            assert stream.text() == shown[1]
