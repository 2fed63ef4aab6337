"""Tokenizers against transformers, sentencepiece and llama.cpp (see tests/data/text/make_*.py)."""

from __future__ import annotations

import json
import shutil
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_support import CORPUS, DATA, SMALL, golden, small, smollm2, smollm2_tokenizer

from sparkjax.text.pretokenizers import RULES
from sparkjax.text.sentencepiece_model import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED
from sparkjax.text.tokenizer import SHIELD, Tokenizer
from sparkjax.text.vocabulary import Vocabulary, byte_characters
from sparkjax.weights.errors import CheckpointError


@pytest.mark.parametrize("name", CORPUS)
def test_smollm2_from_gguf(name):
    t, g, text = smollm2_tokenizer(), golden("smollm2_tokens.json"), CORPUS[name]
    assert t.encode(text) == g["plain"][name]
    assert t.encode_rendered(text) == t.encode(text, special=True) == g["rendered"][name]
    assert t.decode(g["rendered"][name]) == g["decoded"][name]
    assert t.decode(t.encode(text)) == text
    assert t.encode_rendered(t.shield(text)) == g["plain"][name]
    assert b"".join(map(t.token_bytes, g["plain"][name])) == text.encode()


def test_smollm2_settings_and_loading_time():
    file = smollm2()
    start = time.perf_counter()
    t = Tokenizer.from_gguf(file.metadata)
    assert time.perf_counter() - start < 1.0  # 0.1 s on an idle machine
    assert (t.vocab_size, t.bos_id, t.eos_ids, t.add_bos) == (49152, 1, (2,), False)
    assert t.token_id("<|im_end|>") == 2 and t.token_id("the") is None
    assert t.is_special(2) and not t.is_special(100)


@pytest.mark.parametrize("pre", golden("smollm2_tokens.json")["pre"])
def test_other_pre_tokenizers_equal_llama_cpp(pre):
    t = Tokenizer.from_gguf(dict(smollm2().metadata) | {"tokenizer.ggml.pre": pre})
    expected = golden("smollm2_tokens.json")["pre"][pre]
    assert {name: t.encode(text) for name, text in CORPUS.items()} == expected


def test_every_pre_tokenizer_keeps_all_bytes():
    for rule in RULES.values():
        for text in CORPUS.values():
            pieces = "".join(p for p, _ in rule.cut().pre_tokenize_str(text))
            chars = byte_characters()
            assert bytes(chars[c] for c in pieces) == text.encode()


@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("name", golden("small_tokens.json")["texts"])
def test_small_tokenizers(kind, name):
    t, g = small(kind), golden("small_tokens.json")[kind]
    text = golden("small_tokens.json")["texts"][name]
    ids = t.encode(text)
    assert ids == g["plain"][name]
    assert not set(ids) & t.vocabulary.control
    assert t.encode_rendered(t.shield(text)) == ids
    rendered = g.get("rendered", g["plain"])[name]
    assert t.decode(rendered) == g["decoded"][name]
    if "rendered" in g:
        assert t.encode_rendered(text) == rendered


def test_small_settings():
    t = small("bytes")
    assert t.bos_id == t.token_id("<|bos|>") and t.add_bos
    # tokenizer_config.json names one, generation_config.json two.
    assert t.eos_ids == (t.token_id("<|end|>"), t.token_id("<|user|>"))
    assert not t.is_special(t.token_id("<think>"))  # plain in the file, but markup all the same
    assert t.token_id("<unit>") is None
    t = small("pieces")
    assert (t.bos_id, t.eos_ids, t.add_bos) == (1, (2,), True)
    # A user-defined piece that the configuration calls special.
    assert t.is_special(t.token_id("<turn>")) and t.token_id("<table>") is None


@pytest.mark.parametrize("kind", SMALL)
def test_users_cannot_forge_control_tokens(kind):
    t = small(kind)
    for spelling, token in t._control_ids.items():
        for text in (spelling, f"a {spelling} b", spelling * 2, f"\n{spelling}\n"):
            assert not set(t.encode(text)) & t.vocabulary.control, text
            shielded = t.shield(text)
            assert SHIELD not in t.decode(t.encode_rendered(shielded), skip_special=False)
            prompt = t.encode_rendered(spelling + shielded)
            assert prompt[0] == token
            assert not set(prompt[1:]) & t.vocabulary.control, text
    # The mark itself does not help to smuggle a spelling in, or to break a template's.
    some = next(iter(t._control_ids))
    assert not set(t.encode_rendered(t.shield(some[0] + SHIELD + some[1:]))) & t.vocabulary.control
    assert t.encode_rendered(some + SHIELD + "x")[-1] not in t.vocabulary.control


def test_white_space_that_a_control_token_swallows():
    t = small("bytes")
    end = t.token_id("<|end|>")
    eager = Tokenizer(
        t.vocabulary,
        t._encoder,
        bos_id=None,
        eos_ids=[],
        add_bos=False,
        swallow={end: (True, True)},
    )
    assert eager.encode_rendered("a \n<|end|>\n b") == [*t.encode("a"), end, *t.encode("b")]


@settings(deadline=None)
@given(st.text(max_size=60))
def test_any_text_comes_back(text):
    text.encode("utf-8")
    for kind in SMALL[::2]:
        t = small(kind)
        ids = t.encode(text)
        assert t.decode(ids) == text
        prefix = b" " if t.vocabulary.strip_first_space and text else b""
        assert b"".join(map(t.token_bytes, ids)) == prefix + text.encode()


def test_lone_surrogates_become_replacement_characters():
    t = small("bytes")
    assert t.decode(t.encode("a\ud800b\ud83d\ude00\udc00")) == "a\ufffdb😀\ufffd"
    assert t.decode(t.encode_rendered("\udfff")) == "\ufffd"


def test_token_names_are_distinct_and_reversible():
    """T27: tokens that are parts of characters have their own names and exact bytes."""
    t = small("bytes")
    names = {t.token_text(i) for i in range(t.vocab_size)}
    assert len(names) == t.vocab_size
    ids = t.encode("가")
    assert len(ids) > 1
    assert b"".join(map(t.token_bytes, ids)) == "가".encode()
    for i in range(t.vocab_size):
        name = t.token_text(i)
        if name.startswith("bytes:"):
            raw = bytes.fromhex(name.removeprefix("bytes:").replace("\\x", ""))
        else:
            raw = name.encode()
        assert raw == t.token_bytes(i)
    assert small("pieces").token_bytes(small("pieces").vocabulary.tokens.index("<0xE2>")) == b"\xe2"


def test_ids_outside_the_vocabulary():
    t = small("bytes")
    assert t.token_bytes(t.vocab_size + 5) == b"" and t.decode([t.vocab_size]) == ""
    with pytest.raises(IndexError, match="-1 is negative"):
        t.token_bytes(-1)


def test_bytes_of_odd_spellings():
    v = Vocabulary(("Ġa", "｜x｜", None, "Ċ"), byte_level=True, literal=frozenset({1}))
    assert [v.bytes_of(i) for i in range(4)] == [b" a", "｜x｜".encode(), b"", b"\n"]
    odd = Vocabulary(("日",), byte_level=True)
    assert odd.bytes_of(0) == "日".encode()


def pieces_metadata(**changes):
    """GGUF metadata with the pieces of tests/data/text/pieces."""
    t = small("pieces")
    processor = t._encoder._first
    kinds = []
    for i in range(t.vocab_size):
        kind = NORMAL
        for test, value in (("unknown", UNKNOWN), ("control", CONTROL), ("byte", BYTE)):
            kind = value if getattr(processor, f"is_{test}")(i) else kind
        kinds.append(USER_DEFINED if t.vocabulary.tokens[i] == "<table>" else kind)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": list(t.vocabulary.tokens),
        "tokenizer.ggml.scores": np.array(
            [processor.get_score(i) for i in range(t.vocab_size)], np.float32
        ),
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    } | {f"tokenizer.ggml.{k}": v for k, v in changes.items()}


def test_sentencepiece_vocabulary_of_a_gguf_file():
    t, g = Tokenizer.from_gguf(pieces_metadata()), golden("small_tokens.json")
    for name, text in g["texts"].items():
        assert t.encode(text) == g["pieces"]["plain"][name], name
        assert t.decode(t.encode(text)) == g["pieces"]["decoded"][name]
    assert t.add_bos and t.bos_id == 1 and t.eos_ids == (2,)
    after = t.encode_rendered("<|end|>hi")  # no space in front of what follows a control token
    assert "".join(t.vocabulary.tokens[i] for i in after) == "<|end|>hi"
    assert t.token_bytes(t.encode("hi")[0]).startswith(b" ")
    plain = Tokenizer.from_gguf(pieces_metadata(add_space_prefix=False))
    assert plain.decode(plain.encode(" x")) == " x"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, "model is 'bert'; allowed: gpt2, llama"),
        ({"tokens": ["a", "b", "a"]}, "tokens holds 'a' twice"),
        ({"bos_token_id": 70000}, "bos_token_id is 70000"),
        ({"add_bos_token": "yes"}, "add_bos_token is a str; allowed: bool"),
        ({"bos_token_id": -1}, "bos_token_id is -1"),
        ({"scores": None}, "scores is missing"),
        ({"scores": ["a"]}, "scores is a list; allowed: an array"),
        ({"scores": np.zeros(3, np.float32)}, "scores has 3 entries, but there are 700"),
        ({"tokens": [np.zeros(1)]}, "tokens holds arrays"),
        ({"model": "gpt2", "pre": "tekken"}, "pre is 'tekken'; allowed: gpt-2"),
        ({"model": "gpt2", "merges": ["q zzz"]}, "merges do not fit"),
        ({"model": "gpt2"}, "merges is missing"),
    ],
)
def test_bad_gguf_metadata_is_refused(changes, message):
    metadata = pieces_metadata(**changes)
    if changes.get("tokens"):
        del metadata["tokenizer.ggml.token_type"]
    with pytest.raises(CheckpointError, match=rf"m\.gguf: tokenizer\.ggml\.{message}"):
        Tokenizer.from_gguf(metadata, "m.gguf")


def test_bad_folders_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"neither tokenizer\.json nor"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"no model")
    with pytest.raises(CheckpointError, match="no sentencepiece model"):
        Tokenizer.from_dir(tmp_path)
    shutil.copy(DATA / "bytes" / "tokenizer.json", tmp_path)
    spec = json.loads((tmp_path / "tokenizer.json").read_text())
    for change, message in (
        ({"decoder": {"type": "WordPiece"}}, "decoder is.*WordPiece"),
        ({"model": {"type": "WordPiece"}}, "WordPiece.*BPE, Unigram"),
        ({"pre_tokenizer": {"type": "Nonsense"}}, "no tokenizer"),
    ):
        (tmp_path / "tokenizer.json").write_text(json.dumps(spec | change))
        with pytest.raises(CheckpointError, match=message):
            Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not JSON"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(CheckpointError, match="eos_token_id is 'x'"):
        Tokenizer.from_dir(tmp_path)
