"""What every parser keeps for any text: cutting changes nothing, nothing is lost, nothing raises."""

from __future__ import annotations

import json
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parsing_support import CORPUS, TOOLS, apart, cut, mutation, parse

from sparkjax.text.events import ContentDelta, ReasoningDelta, ToolArgumentsDelta, fold
from sparkjax.text.parsing import FORMATS, Setup
from sparkjax.text.stops import StopMatcher

STARTS = ("content", "reasoning", "auto", "call")
SIZES = st.lists(st.integers(1, 8), min_size=1, max_size=8)


@st.composite
def mutated(draw, name: str) -> str:
    """An output of a model that has lost its way: real ones cut, doubled, spliced and misspelled."""
    texts = st.sampled_from(CORPUS[name])
    text = draw(texts)
    for kind in draw(
        st.lists(
            st.sampled_from(["delete", "double", "splice", "replace", "tail", "cut"]), max_size=5
        )
    ):
        at = draw(st.integers(0, len(text)))
        end = at + draw(st.integers(1, 30))
        other = draw(texts)
        place = draw(st.integers(0, len(other)))
        char = draw(st.sampled_from("<>{}[]\"'\\/\n ,;:=()|x1-é😀"))
        text = mutation(kind, text, at, end, other, place, char)
    return text


@pytest.mark.parametrize("name", FORMATS)
@settings(deadline=None, max_examples=80)
@given(data=st.data())
def test_any_cutting_of_any_text_folds_to_the_same_message(name, data):
    text = data.draw(mutated(name))
    setup = Setup(
        tools=TOOLS if data.draw(st.integers(0, 4)) else {},
        start=data.draw(st.sampled_from(STARTS)),  # type: ignore[arg-type]
    )
    finish = data.draw(st.sampled_from(["stop", "length"]))
    pieces = apart(name, text) if data.draw(st.booleans()) else [(None, text)]
    whole = fold(parse(name, setup, pieces, finish))
    assert fold(parse(name, setup, cut(pieces, data.draw(SIZES)), finish)) == whole
    assert fold(parse(name, setup, cut(pieces, [1]), finish)) == whole
    for call in whole.tool_calls:
        if call.complete:  # arguments are a JSON object, without NaN and the like
            assert isinstance(json.loads(call.arguments, parse_constant=pytest.fail), dict)


@pytest.mark.parametrize("name", FORMATS)
@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_stop_strings_in_front_of_a_parser_change_nothing_about_that(name, data):
    text = data.draw(mutated(name))
    stops = tuple(data.draw(st.lists(st.text("</>\n{arg", min_size=1, max_size=4), max_size=2)))
    setup = Setup(tools=TOOLS, start=data.draw(st.sampled_from(STARTS)))  # type: ignore[arg-type]

    def message(sizes: list[int]):
        matcher, parser, events = StopMatcher(stops), FORMATS[name].make(setup), []
        for _, piece in cut([(None, text)], sizes):
            certain, found = matcher.push(piece)
            events += parser.feed(certain)
            if found is not None:
                break
        else:
            events += parser.feed(matcher.flush())
        return fold(events + parser.finish("stop"))

    assert message(data.draw(SIZES)) == message([max(len(text), 1)]) == message([1])


@pytest.mark.parametrize("name", FORMATS)
@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_text_is_never_lost(name, data):
    """Without a call in it, an answer that ended by itself is its text, in order and complete;
    without tools it is so character for character."""
    if name == "harmony":
        pytest.skip("its headers are no text of the answer")
    text = data.draw(mutated(name))
    message = fold(parse(name, Setup(start="content"), [(None, text)], "length"))
    assert message.content == text and not message.tool_calls and not message.reasoning
    for pieces in ([(None, text)], apart(name, text)):
        message = fold(parse(name, Setup(tools=TOOLS, start="content"), pieces, "stop"))
        if not message.tool_calls:
            assert message.content == text


@pytest.mark.parametrize("name", FORMATS)
@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_places_of_content_are_where_it_was_fed(name, data):
    text = data.draw(mutated(name))
    setup = Setup(tools=TOOLS, start=data.draw(st.sampled_from(STARTS)))  # type: ignore[arg-type]
    for pieces in ([(None, text)], cut(apart(name, text), data.draw(SIZES))):
        for event in parse(name, setup, pieces, "stop"):
            if isinstance(event, ContentDelta):
                assert text[event.at : event.at + len(event.text)] == event.text


@pytest.mark.parametrize("name", FORMATS)
@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_what_was_sent_of_a_call_is_a_beginning_of_the_whole(name, data):
    """Every prefix of the text gives a prefix of the message: nothing that was sent is taken back."""
    text = data.draw(mutated(name))
    setup = Setup(tools=TOOLS, start=data.draw(st.sampled_from(STARTS)))  # type: ignore[arg-type]
    parser = FORMATS[name].make(setup)
    events = parser.feed(text[: data.draw(st.integers(0, len(text)))])
    seen, whole = fold(events), fold(parse(name, setup, [(None, text)], "stop"))
    assert whole.content.startswith(seen.content) and whole.reasoning.startswith(seen.reasoning)
    for early, late in zip(seen.tool_calls, whole.tool_calls, strict=False):
        assert (early.id, early.name) == (late.id, late.name)
        assert late.arguments.startswith(early.arguments)


def _calls(work) -> int:
    """How many function calls a piece of work takes: time that does not depend on the machine."""
    count = 0

    def count_one(frame, event, arg):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(count_one)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


HARD = {
    "glm": "<tool_call>x<arg_key>",
    "qwen": "<tool_call>\n<function=f>\n<parameter=a>\n",
    "mimo": "<tool_call><function=f><parameter=a>",
    "hermes": '<tool_call>{"name": "f", "arguments": {"a": [',
    "dsml": "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=",
    "dsml_spaced": "<｜DSML｜ calls>\n<｜DSML｜ invoke name=",
    "llama": '<|python_tag|>{"name": "f", ',
    "pythonic": "<|python_start|>[f(a='\\x41\\",
    "harmony": "<|start|>assistant<|channel|>commentary to=functions.f<|message|>{",
    "plain": "</think>\n<think>",
}


@pytest.mark.parametrize("name", FORMATS)
def test_time_is_linear_in_the_text(name):
    """Twice the text takes at most a little more than twice the calls, whole or by characters."""
    for start in ("content", "reasoning"):
        setup = Setup(tools=TOOLS, start=start)  # type: ignore[arg-type]
        for unit in (HARD[name], "<", "\n", "{", '"'):
            for size in (1, 10**9):

                def work(count: int, unit=unit, size=size, setup=setup) -> int:
                    pieces = cut([(None, unit * count)], [size])
                    return _calls(lambda: parse(name, setup, pieces, "stop"))

                once = work(1200 // len(unit))
                assert work(2400 // len(unit)) < 2.3 * once + 500, (unit, size)


def test_reasoning_and_arguments_never_hold_more_than_a_tag():
    """Text leaves as it comes: what is held is shorter than the longest tag."""
    parser = FORMATS["qwen"].make(Setup(tools=TOOLS, start="reasoning"))
    shown = 0
    for i in range(200):
        events = parser.feed("a <")
        shown += sum(len(e.text) for e in events if isinstance(e, ReasoningDelta))
        assert 3 * (i + 1) - shown <= 1
    parser.feed("</think><tool_call>\n<function=write_file>\n<parameter=content>\n" + "x" * 200)
    shown = 0
    for i in range(200):
        events = parser.feed("a <")
        shown += sum(len(e.text) for e in events if isinstance(e, ToolArgumentsDelta))
        assert 3 * (i + 1) - shown <= 1
