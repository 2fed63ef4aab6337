"""Grammars over a small vocabulary of bytes, words and control tokens, and random answers to them."""

from __future__ import annotations

import random

import numpy as np

from sparkjax.structured.grammars import Grammars

WORDS = [
    b'{"',
    b'": ',
    b'", "',
    b"true",
    b"null",
    b" the",
    b"\n\n",
    "é".encode(),
    "한".encode()[:2],
    b'"}',
    b"</",
    b"<parameter=",
]
CONTROL = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>",
    "</arg_value>", "｜DSML｜", "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>",
    "<|call|>", "<|return|>",
]  # fmt: skip
END = 256 + len(WORDS) + len(CONTROL)
TOKENS = [bytes([i]) for i in range(256)] + WORDS + [c.encode() for c in CONTROL] + [b"<end>"]
TAGS = {tag: 256 + len(WORDS) + i for i, tag in enumerate(CONTROL)}
# An unused id, as padded vocabularies have them.
GRAMMARS = Grammars([*TOKENS, b""], [*TAGS.values()], [END])
WORDS_PER_MASK = len(GRAMMARS.alphabet.free)


def allowed(matcher) -> list[int]:
    row = np.zeros((1, WORDS_PER_MASK), np.uint32)
    matcher.masks(row)
    assert matcher.error is None, matcher.error
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


CLOSERS = [
    "</arg_value>",
    "\n</parameter>\n",
    "</parameter>",
    "</｜DSML｜parameter>\n",
    "</｜DSML｜ parameter>\n",
    "<tool_call>",
    "<｜DSML｜tool_calls>\n",
    "<｜DSML｜ calls>\n",
    "<|end|>",
    "<|call|>",
]


def spelled(written: str, control: bool) -> list[int]:
    """Single bytes, and control tokens where they are wanted."""
    found: list[int] = []
    while written:
        tag = next((t for t in TAGS if control and written.startswith(t)), "")
        found += [TAGS[tag]] if tag else written[0].encode()
        written = written[len(tag) or 1 :]
    return found


def answer(source: str, seed: int, longest: int = 4000, after: str = "") -> list[int]:
    """A random answer without its end; closing things is likelier than going on."""
    rng = random.Random(seed)
    matcher = GRAMMARS.matcher(source, after)
    found: list[int] = []
    closing = {*TAGS.values(), ord('"'), ord("}"), ord("]"), END}
    ways = [spelled(closer, control) for closer in CLOSERS for control in (True, False)]
    out = np.zeros((40, WORDS_PER_MASK), np.uint32)
    while len(found) < longest:
        options = allowed(matcher)
        assert options, found
        wish = 0.9 if len(found) > 300 else 0.3
        ends = [t for t in options if t in closing]
        way = rng.choice(ways)
        if rng.random() < wish and matcher.masks(out, way) == len(way) + 1:
            chosen = way
        else:
            chosen = [rng.choice(ends if ends and rng.random() < wish else options)]
        if chosen == [END]:
            return found
        found += chosen
        for token in chosen:
            matcher.advance(token)
        assert matcher.error is None, matcher.error
    raise AssertionError(f"no end after {longest} tokens: {text(found)[-200:]!r}")


def text(tokens: list[int]) -> str:
    return b"".join(TOKENS[t] for t in tokens).decode("utf-8", "replace")


def follows(source: str, written: str) -> bool:
    """Whether a text, as bytes, is a whole answer."""
    matcher = GRAMMARS.matcher(source)
    for byte in written.encode():
        matcher.advance(byte)
        if matcher.error is not None:
            return False
    return matcher.complete
