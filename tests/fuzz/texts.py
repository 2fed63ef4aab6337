"""What models write: parsers of answers, stop strings, and JSON as it comes."""

from __future__ import annotations

import contextlib
import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "parsing"))

from parsing_support import CORPUS, TOOLS, apart, cut, mutation, parse

from sparkjax.api.answer import Answer
from sparkjax.api.wire import ChatWire, Whole
from sparkjax.engine.plan import Event
from sparkjax.text.events import fold
from sparkjax.text.parsing import FORMATS, Setup
from sparkjax.text.parsing.json_text import DEEPEST, JsonScanner
from sparkjax.text.parsing.pythonic import Malformed, literal
from tests.api import talk, toy

Check = Callable[[random.Random], None]
STARTS = ("content", "reasoning", "auto", "call")
KINDS = ("delete", "double", "splice", "replace", "tail", "cut")
JSON_PIECES = ['{"name": "get_weather", "arguments": ', "{", "}", "[", "]", '"', ":", ",", " ", "\n",
               '"city"', '"Oslo"', "\\u00", "\\ud83d", "\\", "-1.5e9", "1e999", "true", "nul", "NaN", "é😀"]  # fmt: skip


def written(rng: random.Random, name: str) -> str:
    """What a model that has lost its way writes in a format."""
    if rng.random() < 0.15:  # from pieces alone
        pieces = [
            *FORMATS[name].parser.control,
            *JSON_PIECES,
            "get_weather",
            "functions.get_weather",
        ]
        return "".join(rng.choice(pieces) for _ in range(rng.randint(1, 40)))
    text, texts = rng.choice(CORPUS[name]), CORPUS[name]
    for _ in range(rng.randint(0, 5)):
        at, other = rng.randint(0, len(text)), rng.choice(texts)
        text = mutation(
            rng.choice(KINDS), text, at, at + rng.randint(1, 30), other, rng.randint(0, len(other)),
            rng.choice("<>{}[]\"'\\/\n ,;:=()|x1-é😀\x00\ufffd"),
        )  # fmt: skip
    return text


@contextlib.contextmanager
def parsers() -> Iterator[Check]:
    """Any cutting of any text folds to the same message, and arguments are JSON objects."""

    def check(rng: random.Random) -> None:
        name = rng.choice(list(FORMATS))
        text = written(rng, name)
        setup = Setup(tools=TOOLS if rng.random() < 0.8 else {}, start=rng.choice(STARTS))  # type: ignore[arg-type]
        finish = rng.choice(["stop", "length"])
        pieces = apart(name, text) if rng.random() < 0.5 else [(None, text)]
        whole = fold(parse(name, setup, pieces, finish))
        sizes = [rng.randint(1, 8) for _ in range(rng.randint(1, 8))]
        assert fold(parse(name, setup, cut(pieces, sizes), finish)) == whole, (name, text, sizes)
        assert fold(parse(name, setup, cut(pieces, [1]), finish)) == whole, (name, text)
        for call in whole.tool_calls:
            if call.complete:
                assert isinstance(json.loads(call.arguments, parse_constant=refuse), dict), text

    yield check


@contextlib.contextmanager
def answers() -> Iterator[Check]:
    """However many tokens come in a step, the streamed message is the whole one."""
    tokenizer = talk.make_tokenizer()
    names = list(FORMATS)

    def check(rng: random.Random) -> None:
        name = rng.choice(names)
        text = written(rng, name)
        tokens = tokenizer.encode_rendered(text)[:600]
        for _ in range(rng.randint(0, 3)):  # bytes that are no characters
            tokens.insert(rng.randint(0, len(tokens)), rng.randrange(256))
        finish = rng.choice(["stop", "length"])
        stops = tuple(
            text[at : at + rng.randint(1, 4)]
            for at in (rng.randrange(max(len(text), 1)) for _ in range(rng.randint(0, 2)))
            if text[at : at + 1]
        )
        setup, one_call = Setup(TOOLS, rng.choice(STARTS)), rng.random() < 0.5  # type: ignore[arg-type]

        def read(sizes: list[int]) -> tuple[Any, ...]:
            answer = Answer(
                tokenizer, stops, (toy.END,), parser=FORMATS[name].make(setup), one_call=one_call
            )
            whole, chat, deltas, at, turn = Whole(), ChatWire(tokenizer, False), [], 0, 0
            while answer.finish is None:
                part = tuple(tokens[at : at + sizes[turn % len(sizes)]])
                at, turn = at + len(part), turn + 1
                piece = answer.push(
                    Event(1, part, (), finish=finish if at >= len(tokens) else None)
                )
                if piece is not None:
                    whole.add(piece)
                    deltas += [c["delta"] for c in chat.chunks(0, piece)]
            said = "".join(d.get("content") or "" for d in deltas)
            assert said == whole.message.content, (name, text)
            return chat.choice(0, whole), answer.tokens, answer.reasoning_tokens, answer.finish

        sizes = [rng.randint(1, 8) for _ in range(rng.randint(1, 6))]
        assert read(sizes) == read([1]), (name, text, tokens, stops, sizes)

    yield check


@contextlib.contextmanager
def values() -> Iterator[Check]:
    """The scanner of JSON agrees with Python's reader; Python's literals become JSON or nothing."""

    def check(rng: random.Random) -> None:
        text = json.dumps(value(rng, 4), ensure_ascii=rng.random() < 0.5)
        for _ in range(rng.randint(0, 3)):
            at = rng.randint(0, len(text))
            text = text[:at] + rng.choice([*JSON_PIECES, ""]) + text[at + rng.randint(0, 2) :]
        scanner, at = JsonScanner(), 0
        while at < len(text) and not scanner.done and not scanner.broken:
            end = at + rng.randint(1, 9)
            at = scanner.scan(text[:end], at)
        scanner.scan(text + " ", at)  # a number at the top ends with what follows it
        if scanner.done and not text[at:].strip():
            json.loads(text, parse_constant=refuse)
        elif scanner.broken:
            try:
                json.loads(text, parse_constant=refuse)
            except (ValueError, AssertionError):
                pass
            else:  # numbers beyond a float and more brackets than this are refused here
                assert "e" in text.lower() or text.count("[") + text.count("{") > DEEPEST, text
        with contextlib.suppress(Malformed):
            json.loads(literal(text), parse_constant=refuse)

    yield check


def value(rng: random.Random, deep: int) -> Any:
    """Any JSON value."""
    kind = rng.randrange(8 if deep else 6)
    if kind < 6:
        text = "".join(rng.choice('aé😀"\\\n\x07\u2028 ') for _ in range(rng.randint(0, 6)))
        return [None, True, rng.randint(-(10**6), 10**6), rng.uniform(-1e9, 1e9), text, ""][kind]
    inner = [value(rng, deep - 1) for _ in range(rng.randint(0, 4))]
    return inner if kind == 6 else {f"k{rng.randrange(5)}": each for each in inner}


def refuse(word: str) -> None:
    """NaN and the like are no JSON."""
    raise AssertionError(word)
