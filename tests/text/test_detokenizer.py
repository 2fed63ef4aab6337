"""Streaming text equals the decoded whole, whatever the chunks."""

from __future__ import annotations

from itertools import pairwise

import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from text_support import CORPUS, DATA, SMALL, small, smollm2_tokenizer

from sparkjax.text.detokenizer import Detokenizer


def chunked(draw, items):
    """Any cutting of a list, empty chunks included."""
    cuts = draw(st.lists(st.integers(0, len(items)), max_size=12))
    edges = [0, *sorted(cuts), len(items)]
    return [items[a:b] for a, b in pairwise(edges)]


@st.composite
def streams(draw, t):
    """Token ids of a text, of pieces of texts cut at tokens, or at random; with their chunks."""
    texts = st.sampled_from(list(CORPUS.values())) | st.text(max_size=12)
    parts = draw(st.lists(texts, max_size=3))
    ids = [i for part in parts for i in t.encode_rendered(part)]
    if draw(st.booleans()):
        where = draw(st.integers(0, len(ids)))
        noise = draw(st.lists(st.integers(0, t.vocab_size + 3), max_size=6))
        ids = ids[:where] + noise + ids[draw(st.integers(where, len(ids))) :]
    return ids, chunked(draw, ids)


@settings(max_examples=200, deadline=None)
@given(st.data(), st.sampled_from(SMALL), st.booleans())
def test_any_chunks_give_the_decoded_text(data, kind, skip):
    t = small(kind)
    ids, chunks = data.draw(streams(t))
    d = Detokenizer(t, skip_special=skip)
    for _ in range(2):  # the same object serves the next stream after a flush
        text = "".join([*map(d.push, chunks), d.flush()])
        assert text == t.decode(ids, skip_special=skip)


def test_the_whole_corpus_token_by_token():
    t = smollm2_tokenizer()
    for name, text in CORPUS.items():
        d = Detokenizer(t)
        deltas = [d.push([i]) for i in t.encode(text)]
        expected = text
        assert "".join(deltas) + d.flush() == expected, name
        if "\ufffd" not in text:
            assert not any("\ufffd" in delta for delta in deltas), name


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 499), max_size=20))
def test_invalid_bytes_are_replaced_as_tokenizers_does(ids):
    """Random ids are mostly invalid UTF-8: Python and Rust replace the same maximal subparts."""
    t = small("bytes")
    theirs = tokenizers.Tokenizer.from_file(str(DATA / "bytes" / "tokenizer.json"))
    d = Detokenizer(t)
    assert "".join([*(d.push([i]) for i in ids), d.flush()]) == theirs.decode(ids)


def byte_tokens(t, raw: bytes) -> list[int]:
    by_bytes = {t.token_bytes(i): i for i in range(t.vocab_size)}
    return [by_bytes[bytes([b])] for b in raw]


def test_a_character_over_several_tokens_is_held():
    """T16: the first token holds only part of a character."""
    for kind in ("bytes", "pieces"):
        t = small(kind)
        d = Detokenizer(t)
        d.push(t.encode("x"))
        assert [d.push([i]) for i in byte_tokens(t, "가😀".encode())] == [
            "", "", "가", "", "", "", "😀",
        ]  # fmt: skip
        assert d.flush() == ""


def test_streams_do_not_share_state():
    """T17: "hi" comes at once, the emoji when it is complete, in eight interleaved streams."""
    t = small("pieces")
    ids = t.encode("hi") + byte_tokens(t, "😀".encode())
    streams = [Detokenizer(t) for _ in range(8)]
    out = [""] * 8
    for step in range(len(ids) + 7):
        for k, stream in enumerate(streams):
            if 0 <= step - k < len(ids):
                out[k] += stream.push([ids[step - k]])
                if step - k == len(t.encode("hi")) - 1:
                    assert out[k] == "hi"
    assert out == ["hi😀"] * 8


def test_a_stream_that_ends_inside_a_character():
    """T18: what is pending is flushed; replaced only where it is invalid."""
    t = small("bytes")
    d = Detokenizer(t)
    assert d.push(t.encode("ok ") + byte_tokens(t, "é".encode() + b"\xf0\x9f\x98")) == "ok é"
    assert d.flush() == "\ufffd"
    assert d.push(byte_tokens(t, b"\xe2\x82A")) == "\ufffdA"
    assert d.flush() == ""


def test_special_tokens():
    t = small("bytes")
    end = t.token_id("<|end|>")
    euro = byte_tokens(t, "€".encode())
    ids = [*euro[:2], end, euro[2], end]
    d = Detokenizer(t)
    assert [d.push([i]) for i in ids] == ["", "", "", "€", ""]
    d = Detokenizer(t, skip_special=False)
    assert "".join([*(d.push([i]) for i in ids), d.flush()]) == "\ufffd<|end|>\ufffd<|end|>"


def test_the_first_space_of_sentencepiece():
    t = small("pieces")
    ids = t.encode("a b")
    d = Detokenizer(t)
    assert "".join(d.push([i]) for i in [1, *ids]) == "a b"
    assert d.flush() == ""
    assert d.push(ids) == "a b"
