"""From tokens to text: what a client sees does not depend on how the engine groups its tokens."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sparkjax.api.answer import Answer, Piece
from sparkjax.api.wire import ChatWire, Whole
from sparkjax.engine.plan import Event

from . import fake_engine, toy

TOKENIZER = toy.make_tokenizer()
CORPUS = [
    "안녕하세요, 한국어 텍스트입니다. 한국", "สวัสดีชาวโลก ภาษาไทย", "नमस्ते दुनिया हिन्दी",
    "hi😀 👨‍👩‍👧‍👦 👍🏽 🏳️‍🌈", "🇰🇷🇹🇭🇮🇳🇫🇷", "Hello the world\n\nABC é", "a\nb\r\nc\t",
]  # fmt: skip


def events(tokens, sizes, finish="stop", scored=True) -> list[Event]:
    """The tokens of one answer in events of these sizes (repeated), the last one with the finish."""
    out, at, turn = [], 0, 0
    while True:
        size = sizes[turn % len(sizes)]
        part = tuple(tokens[at : at + size])
        entries = tuple(fake_engine.logprob(t, at + i, 2) for i, t in enumerate(part))
        at, turn = at + size, turn + 1
        last = at >= len(tokens)
        out.append(Event(1, part, entries if scored else (), finish=finish if last else None))
        if last:
            return out


def run(answer: Answer, given_events) -> tuple[Whole, list[Piece]]:
    whole, pieces = Whole(), []
    for event in given_events:
        piece = answer.push(event)
        if piece is not None:
            pieces.append(piece)
            whole.add(piece)
    return whole, pieces


def fold(tokens, sizes=(1,), stops=(), finish="stop", **options):
    answer = Answer(TOKENIZER, tuple(stops), (toy.END,), **options)
    whole, pieces = run(answer, events(tokens, sizes, finish))
    return whole, pieces, answer


def test_T16_a_character_over_several_tokens_is_held_until_it_is_whole():
    first, rest = TOKENIZER.encode("한국")  # cut after the first byte of three
    whole, pieces, _ = fold([first, rest], finish="length")
    assert [p.text for p in pieces] == ["한국"] == [whole.text]
    ids = [*"한국".encode()]  # one byte a token
    whole, pieces, _ = fold(ids, finish="length")
    assert whole.text == "한국"
    assert [p.text for p in pieces if p.text] == ["한", "국"]
    assert "\ufffd" not in "".join(p.text for p in pieces)


def test_T17_text_before_an_emoji_streams_at_once_each_request_for_itself():
    ids = TOKENIZER.encode("hi😀")
    assert len(ids) == 3  # hi, and the emoji in two halves
    answers = [Answer(TOKENIZER) for _ in range(8)]
    seen = [""] * 8
    for step in range(3 + 7):  # staggered: at any step the requests are at different places
        for i, answer in enumerate(answers):
            at = step - i
            if 0 <= at < 3:
                piece = answer.push(Event(i, (ids[at],), finish="length" if at == 2 else None))
                seen[i] += piece.text if piece else ""
                assert seen[i] == ("hi", "hi", "hi😀")[at]
    assert seen == ["hi😀"] * 8


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_T18_an_unfinished_character_is_flushed_at_the_end(finish):
    half = "😀".encode()[:2]
    tokens = [*b"ab", *half, *([toy.END] if finish == "stop" else [])]
    for sizes in ((1,), (2,), (9,)):
        whole, _, _ = fold(tokens, sizes, finish=finish)
        assert whole.text == "ab\ufffd" and whole.finish == finish
    # What is no UTF-8 anywhere is replaced where it stands; the rest stays.
    whole, _, _ = fold([*b"a", 0xFF, *"é".encode()], finish="length")
    assert whole.text == "a\ufffdé"


def test_T19_a_partial_match_is_held_and_released_when_it_fails():
    stop = "DEFGHIJ"
    whole, pieces, answer = fold(TOKENIZER.encode("ABCDEFGHIJ\nKLM"), stops=[stop], finish="length")
    assert whole.text == "ABC" and whole.finish == "stop" and answer.text_stop == stop
    assert all(not set(p.text) & set("DEFGHIJ") for p in pieces)
    whole, pieces, _ = fold(TOKENIZER.encode("ABCDEFGHIX"), stops=[stop], finish="length")
    assert whole.text == "ABCDEFGHIX" and whole.finish == "length"
    assert [p.text for p in pieces if p.text][-1].startswith("DEFGHI")


def test_T19_a_match_at_the_very_end_and_a_half_one():
    whole, _, answer = fold([*TOKENIZER.encode("ABCDEF"), toy.END], stops=["DEFG", "DEF"])
    assert whole.text == "ABC" and whole.finish == "stop" and answer.text_stop == "DEF"
    whole, _, _ = fold([*TOKENIZER.encode("ABCDE"), toy.END], stops=["DEF"])
    assert whole.text == "ABCDE"


def test_T21_text_before_a_newline_in_the_same_token_is_delivered():
    token = 256 + toy.WORDS.index(b"text\nmore")
    whole, _, _ = fold([token], stops=["\n"], finish="length")
    assert whole.text == "text" and whole.finish == "stop"


def test_usage_counts_through_the_token_that_completes_the_stop():
    _, _, answer = fold(TOKENIZER.encode("ABCDEFGHIxyz"), sizes=(9,), stops=["EF"], finish="length")
    assert answer.tokens == 2  # ABC, DEF
    _, _, answer = fold([*TOKENIZER.encode("ABC"), toy.END])
    assert answer.tokens == 2  # the end token was generated too


def test_a_stop_in_a_flushed_character_is_found():
    whole, _, _ = fold([*b"a", *"é".encode()[:1]], stops=["\ufffd"], finish="length")
    assert whole.text == "a" and whole.finish == "stop"


def test_logprobs_cover_exactly_the_tokens_of_the_text():
    tokens = [*TOKENIZER.encode("Hello"), toy.PAD, *TOKENIZER.encode("😀ABCDEF"), toy.END]
    whole, _, _ = fold(tokens, stops=["CD"])
    scored = [s.entry.token for s in whole.scored]
    assert scored == tokens[: len(scored)] and len(scored) == 5  # through ABC, of which AB is text
    assert [s.offset for s in whole.scored] == [0, 5, 5, 5, 6]
    # A special token inside has no bytes, so the bytes make up the text.
    entries = ChatWire(TOKENIZER, True).choice(0, whole)["logprobs"]["content"]
    raw = b"".join(bytes(e["bytes"]) for e in entries if e["bytes"] is not None)
    assert raw.decode() == "Hello😀ABC" and whole.text == "Hello😀AB"
    whole, _, _ = fold(tokens)
    assert [s.entry.token for s in whole.scored] == tokens[:-1]  # all but the end


def test_logprobs_wait_for_the_text_of_their_token():
    _, pieces, _ = fold(TOKENIZER.encode("ABCDEFGHI"), stops=["DEFX"], finish="length")
    assert [(p.text, len(p.scored)) for p in pieces] == [("ABC", 1), ("DEFGHI", 2)]


def test_a_continuation_goes_on_where_the_prompt_ends():
    half, rest = "😀".encode()[:2], "😀".encode()[2:]
    whole, _, _ = fold([*rest, *b"!"], finish="length", before=(*b"a", *half))
    assert whole.text == "😀!"


def test_an_answer_ends_once():
    answer = Answer(TOKENIZER, ("b",), (toy.END,))
    assert answer.push(Event(1, (*b"ab",))).finish == "stop"
    assert answer.push(Event(1, (*b"c",))) is None
    assert answer.push(Event(1, finish="stop")) is None
    assert answer.tokens == 2


texts = st.lists(st.sampled_from(CORPUS) | st.text(max_size=6), min_size=1, max_size=3).map("".join)


@st.composite
def answers(draw):
    text = draw(texts)
    tokens = TOKENIZER.encode(text.encode("utf-8", "replace").decode())
    for _ in range(draw(st.integers(0, 2))):  # broken bytes and special tokens anywhere
        at = draw(st.integers(0, len(tokens)))
        tokens.insert(at, draw(st.sampled_from([0xFF, 0xF0, toy.PAD, toy.START])))
    start = draw(st.integers(0, max(len(text) - 1, 0)))
    stops = draw(
        st.lists(
            st.just(text[start : start + draw(st.integers(1, 5))])
            | st.text(min_size=1, max_size=2),
            max_size=4,
        )
    )
    sizes = draw(st.lists(st.integers(1, 7), min_size=1, max_size=5))
    return tokens, [s for s in stops if s][:4], sizes, draw(st.sampled_from(["stop", "length"]))


@settings(max_examples=400, deadline=None)
@given(answers())
@example(([*"😀".encode()], ["\ufffd"], [1, 3], "length"))
@example(([toy.PAD, 65, toy.PAD], ["A"], [1], "length"))
def test_chunks_change_nothing(case):
    """Text, finish, log-probabilities and usage are the same for any grouping of tokens."""
    tokens, stops, sizes, finish = case
    if finish == "stop":
        tokens = [*tokens, toy.END]
    one = fold(tokens, (len(tokens) or 1,), stops, finish)
    many = fold(tokens, sizes, stops, finish)
    assert one[0] == many[0]
    assert (one[2].tokens, one[2].text_stop) == (many[2].tokens, many[2].text_stop)
    decoded = TOKENIZER.decode(tokens)
    found = [at for stop in stops if (at := decoded.find(stop)) >= 0]
    if not found:
        assert one[0].text == decoded
    assert decoded.startswith(one[0].text)
    assert all(stop not in one[0].text for stop in stops)


def test_every_stop_at_every_offset_of_the_corpus():
    for text in CORPUS:
        tokens = TOKENIZER.encode(text)
        for start in range(len(text)):
            for length in (1, 2, 5):
                stop = text[start : start + length]
                for sizes in ((1,), (3,), (len(tokens),)):
                    whole, _, _ = fold(tokens, sizes, [stop], "length")
                    assert whole.text == text[: text.index(stop)]
