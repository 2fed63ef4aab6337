"""The mask interface: rows of draft positions, roll-back, free text in front, the end."""

from __future__ import annotations

import random

import numpy as np
import pytest
from walks import END, GRAMMARS, TAGS, TOKENS, WORDS_PER_MASK, allowed, answer, follows

from sparkjax.structured.grammars import USES
from sparkjax.structured.matcher import GrammarError
from sparkjax.structured.sources import Wanted, source

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "tags": {"type": "array", "items": {"enum": ["a", "é"]}, "maxItems": 3}},
    "required": ["name", "tags"],
}  # fmt: skip
TEXT = source(Wanted("json_schema", PERSON)).text


@pytest.mark.parametrize("after", ["", "</think>"])
def test_T33_draft_rows_are_the_masks_one_by_one(after: str):
    """Masks of k + 1 positions at once, from any place, and nothing of it stays: the automaton
    follows the committed tokens only. The drafts go wrong at a random place."""
    rng = random.Random(3)
    free = [ord("h"), ord("i"), TAGS["</think>"], ord("\n")] if after else []
    for seed in range(6):
        tokens = [*free, *answer(TEXT, seed), END]
        matcher = GRAMMARS.matcher(TEXT, after)
        place = 0
        while place < len(tokens):
            drafts = tokens[place : place + rng.randint(0, 7)]
            wrong = rng.randrange(len(drafts) + 1)
            if wrong < len(drafts) and rng.random() < 0.5:
                drafts = [*drafts[:wrong], 255, *drafts[wrong + 1 :]]
            rows = np.zeros((len(drafts) + 1, WORDS_PER_MASK), np.uint32)
            count = matcher.masks(rows, drafts)
            assert count >= 1 and matcher.error is None
            follower = GRAMMARS.matcher(TEXT, after)
            for token in tokens[:place]:
                follower.advance(token)
            for i in range(count):
                expected = np.zeros((1, WORDS_PER_MASK), np.uint32)
                follower.masks(expected)
                assert (rows[i] == expected[0]).all()
                if i + 1 < count:
                    follower.advance(drafts[i])
                    assert follower.error is None
            if count <= len(drafts):  # the next draft is not among what may come
                draft = drafts[count - 1]
                assert not rows[count - 1][draft // 32] >> np.uint32(draft % 32) & 1
            for token in tokens[place : place + max(count - 1, 1)]:
                matcher.advance(token)
            place += max(count - 1, 1)
            assert matcher.error is None
        assert matcher.ended


def test_free_text_allows_all_but_the_end():
    matcher = GRAMMARS.matcher(TEXT, "</think>")
    assert set(range(len(TOKENS) + 1)) - set(allowed(matcher)) == {END}
    for raw in (b"{", b"</thi", b"nk", b"x"):
        for byte in raw:
            matcher.advance(byte)
    assert END not in allowed(matcher) and TAGS["<think>"] in allowed(matcher)
    matcher.advance(TAGS["</think>"])
    newlines = {i for i, raw in enumerate(TOKENS) if raw and not raw.strip(b"\n")}
    begins = {i for i, raw in enumerate(TOKENS) if raw.startswith(b"{")}
    assert newlines < set(allowed(matcher)) <= newlines | begins
    matcher.advance(ord("\n"))
    matcher.advance(ord("\n"))
    assert not newlines & set(allowed(matcher)), "two at the most"


def test_the_tag_may_be_spelled_and_split():
    matcher = GRAMMARS.matcher(source(Wanted("choice", ["yes"])).text, "</think>")
    for byte in b"hm </think>":
        matcher.advance(byte)
    assert ord("y") in allowed(matcher) and ord("n") not in allowed(matcher)


def test_control_tokens_and_unused_ids_are_never_text():
    for wanted in (Wanted("lark", "start: /(?s:.)*/"), Wanted("json_object")):
        matcher = GRAMMARS.matcher(source(wanted).text)
        for token in b'{"':
            matcher.advance(token)
        assert not set(allowed(matcher)) & {*TAGS.values(), len(TOKENS)}


def test_a_token_that_does_not_follow_is_an_error_that_stays():
    matcher = GRAMMARS.matcher(TEXT)
    matcher.advance(ord("["))
    assert matcher.error == f"token {ord('[')} does not follow the grammar"
    ended = GRAMMARS.matcher(TEXT)
    ended.advance(END)
    assert ended.error is not None, "too early"


def test_matchers_of_one_grammar_are_apart():
    first, second = GRAMMARS.matcher(TEXT), GRAMMARS.matcher(TEXT)
    for token in answer(TEXT, 1):
        first.advance(token)
    assert first.complete and not second.complete
    assert allowed(first) == [END] and END not in allowed(second)


def test_grammars_that_are_none_say_so_every_time():
    for _ in range(2):
        with pytest.raises(GrammarError, match="nothing"):
            GRAMMARS.matcher("start: nothing")


def test_regular_expressions_match_from_end_to_end():
    for pattern in ("ab+", "^ab+$"):
        matcher = GRAMMARS.matcher(source(Wanted("regex", pattern)).text)
        assert not set(allowed(matcher)) & {ord("b"), END}
        for byte in b"ab":
            matcher.advance(byte)
        assert set(allowed(matcher)) == {ord("b"), END}


def test_a_grammar_does_not_wear_out():
    """Its answers share a lexer, whose states are counted; a grammar that failed begins anew."""
    text = source(Wanted("regex", "[ab]{1,40}(x|y[cd]{1,30})")).text
    first = GRAMMARS.prepare(text)
    for seed in range(USES + 3):
        assert follows(text, bytes(answer(text, seed)).decode())
    assert GRAMMARS.prepare(text) is not first
    again = GRAMMARS.prepare(text)
    GRAMMARS.forget(text)
    assert GRAMMARS.prepare(text) is not again
