"""Stop strings: what is emitted does not depend on the chunks, and never holds a stop string."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_support import CORPUS

from sparkjax.text.stops import StopMatcher


def run(stops, chunks):
    """(all emitted text, matched, the deltas)."""
    matcher, deltas, matched = StopMatcher(tuple(stops)), [], None
    for chunk in chunks:
        emit, matched = matcher.push(chunk)
        deltas.append(emit)
        if matched is not None:
            break
    deltas.append(matcher.flush())
    return "".join(deltas), matched, deltas


def expected(stops, text):
    """By definition: the match that ends first; of those that end there, the longest."""
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            best = max(found, key=len)
            return text[: end - len(best)], best
    return text, None


@st.composite
def cases(draw):
    """Text over few letters (so that stop strings overlap), or from the corpus."""
    if draw(st.booleans()):
        letters = st.text("ab\n", min_size=1, max_size=5)
        stops = draw(st.lists(letters, max_size=4))
        text = draw(st.text("ab\n", max_size=24))
    else:
        text = draw(st.sampled_from(list(CORPUS.values())))
        cut = st.integers(0, len(text))
        pairs = draw(st.lists(st.tuples(cut, st.integers(1, 6)), max_size=3))
        stops = [text[a : a + n] for a, n in pairs if text[a : a + n]]
    edges = [0, *sorted(draw(st.lists(st.integers(0, len(text)), max_size=10))), len(text)]
    return stops, text, [text[a:b] for a, b in pairwise(edges)]


@settings(max_examples=500, deadline=None)
@given(cases())
def test_any_chunks_give_the_definition(case):
    stops, text, chunks = case
    emitted, matched, _ = run(stops, chunks)
    assert (emitted, matched) == expected(stops, text)


@settings(max_examples=300, deadline=None)
@given(cases())
def test_only_a_beginning_of_a_stop_string_is_held(case):
    stops, _, chunks = case
    matcher, seen, out = StopMatcher(tuple(stops)), "", ""
    for chunk in chunks:
        emit, matched = matcher.push(chunk)
        seen, out = seen + chunk, out + emit
        if matched is not None:
            return
        held = seen[len(out) :]
        assert seen == out + held
        longest = max(
            (n for s in stops for n in range(1, len(s)) if seen.endswith(s[:n])), default=0
        )
        assert len(held) == longest


@pytest.mark.parametrize("stop", ["끝", "\n\n", "👩‍👩‍👧", "🇰🇷", "</s>", "aab"])
def test_a_stop_string_at_every_offset_and_every_cut(stop):
    body = "กขa\na🇰👩‍가</aa"
    for where in range(len(body) + 1):
        text = body[:where] + stop + body[where:]
        want = expected([stop], text)
        for cut in range(len(text) + 1):
            emitted, matched, _ = run([stop], [text[:cut], text[cut:]])
            assert (emitted, matched) == want
        emitted, matched, _ = run([stop], list(text))
        assert (emitted, matched) == want


def test_held_text_is_released_when_the_match_fails():
    """T19: nothing of a stop string is emitted, and nothing is lost if it stays incomplete."""
    matcher = StopMatcher(("DEFGHIJ",))
    assert matcher.push("ABC") == ("ABC", None)
    assert matcher.push("DEF") == ("", None)
    assert matcher.push("GHX") == ("DEFGHX", None)
    assert matcher.push("DEFGHIJK") == ("", "DEFGHIJ")
    assert matcher.push("more") == ("", "DEFGHIJ")
    assert matcher.flush() == ""
    matcher = StopMatcher(("DEFGHIJ",))
    assert matcher.push("ABCDE") == ("ABC", None)
    assert matcher.flush() == "DE"


def test_text_before_a_newline_stop_in_one_token_is_delivered():
    """T21."""
    assert StopMatcher(("\n",)).push("last words\nnext") == ("last words", "\n")


def test_several_stop_strings():
    assert run(["abcd", "bc"], ["abcd"])[:2] == ("a", "bc")  # ends first
    assert run(["bc", "abc"], ["xabc"])[:2] == ("x", "abc")  # longest of those that end together
    assert run([], ["anything"])[:2] == ("anything", None)


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(("a", ""))


def test_time_is_linear():
    """A text of near misses: a naive matcher would compare every suffix again and again."""
    stop = "a" * 5000 + "b"
    matcher = StopMatcher((stop,))
    out = "".join(matcher.push("a" * 100)[0] for _ in range(2000))
    assert len(out) + len(matcher.flush()) == 200_000
