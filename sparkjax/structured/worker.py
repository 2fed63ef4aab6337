"""The process that judges grammars: it may be killed at any moment, and nobody else notices.

    python -m sparkjax.structured.worker

It reads frames (a big-endian uint32 of the length, then MessagePack) from its standard input and
answers each with one: first a `Vocabulary`, then `Wanted`s, answered with `Verdict`s.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import re
import resource
import signal
import struct
import sys
from collections.abc import Iterator
from typing import IO, Any

import msgspec
import numpy as np

from . import grammars
from .bits import ids, words
from .calls import Calls
from .matcher import Alphabet, GrammarError, Matcher
from .schema import SCHEMA_LISTS, SCHEMA_MAPS, SchemaError, normalise
from .sources import Source, Wanted, json_rule, source, start

MEMORY = 1 << 30
"""Bytes of address space beyond what the process has at its start."""
STEPS = 64
"""Tokens of the random walk that tries a grammar."""

_LENGTH = struct.Struct(">I")


class Vocabulary(msgspec.Struct, frozen=True):
    """What of a model's tokens matters here: how many ids, which of them are no text, and which
    end an answer. Every byte gets an id of its own; how costly a grammar is does not depend on
    the longer ones."""

    size: int
    special: dict[int, bytes]
    ends: tuple[int, ...]


class Verdict(msgspec.Struct, frozen=True):
    """A grammar, or why there is none: `path` is given where a schema is at fault."""

    source: Source | None = None
    error: str = ""
    path: str | None = None


def frame(payload: bytes) -> bytes:
    """A payload behind its length."""
    return _LENGTH.pack(len(payload)) + payload


def write(stream: IO[bytes], value: Any) -> None:
    """One frame."""
    stream.write(frame(msgspec.msgpack.encode(value)))
    stream.flush()


def read(stream: IO[bytes]) -> bytes:
    """The payload of one frame. Raises EOFError at the end."""
    head = stream.read(_LENGTH.size)
    payload = stream.read(_LENGTH.unpack(head)[0]) if len(head) == _LENGTH.size else b""
    if not payload:
        raise EOFError
    return payload


def byte_tokens(vocabulary: Vocabulary) -> list[bytes]:
    """Tokens of single bytes beside the special ones."""
    size = max(vocabulary.size, max([*vocabulary.special, *vocabulary.ends], default=0) + 1)
    taken = {*vocabulary.special, *vocabulary.ends}
    tokens = [vocabulary.special.get(i, b"") for i in range(size)]
    free = (i for i in range(size + 256) if i not in taken)
    for byte in range(256):
        at = next(free)
        if at >= len(tokens):
            tokens += [b""] * (at + 1 - len(tokens))
        tokens[at] = bytes([byte])
    return tokens


class Trial:
    """Builds and tries grammars."""

    def __init__(self, vocabulary: Vocabulary):
        tokens = byte_tokens(vocabulary)
        self._alphabet = Alphabet.of(tokens, vocabulary.ends)
        self._tokenizer = grammars.tokenizer(tokens, list(vocabulary.special), vocabulary.ends)

    def judge(self, wanted: Wanted) -> Verdict:
        """Never raises for a client's mistake."""
        try:
            made = source(wanted)
            try:
                self._walk(made.text)
            except GrammarError:
                for prefix, schema, strict in _schemas(wanted):
                    try:
                        self._blame(normalise(schema, strict)[0])
                    except SchemaError as error:
                        raise error.under(prefix) if prefix else error from None
                raise
        except SchemaError as error:
            return Verdict(error=_short(error.message), path=error.path)
        except (GrammarError, RecursionError, UnicodeError) as error:
            return Verdict(error=_short(str(error)))
        return Verdict(made)

    def _blame(self, root: Any) -> None:
        """Raises SchemaError for the first part of a schema that is wrong by itself."""
        shared = {
            k: root[k] for k in ("$defs", "definitions") if isinstance(root, dict) and k in root
        }
        for path, node in parts(root):
            for key in ("pattern", "oneOf"):
                if key in node:
                    part = {"type": "string"} if key == "pattern" else shared
                    try:
                        self._compile(start(json_rule({**part, key: node[key]})))
                    except GrammarError as error:
                        raise SchemaError(".".join([*path, key]), _said(str(error))) from None

    def _compile(self, text: str) -> Any:
        return grammars.compile_grammar(self._tokenizer, text)

    def _walk(self, text: str) -> None:
        """Compiles, and goes some way into it: limits are counted anew for every token."""
        matcher = Matcher(self._compile(text), self._alphabet)
        row = np.zeros((1, words(len(self._alphabet.tokens))), np.uint32)
        rng = random.Random(0)
        for _ in range(STEPS):
            matcher.masks(row)
            if matcher.error is not None:
                raise GrammarError(matcher.error)
            more = [int(t) for t in ids(row[0]) if t not in self._alphabet.ends]
            if not more:
                return
            matcher.advance(rng.choice(more))


def _schemas(wanted: Wanted) -> Iterator[tuple[str, Any, bool]]:
    """(path, schema, whether it is strict) of what a client wrote as such."""
    if wanted.kind == "json_schema":
        yield "", wanted.value, wanted.strict
    elif wanted.kind == "calls":
        calls = msgspec.convert(wanted.value, Calls)
        for tool in calls.tools:
            if not tool.custom and (tool.enforced or not calls.free):
                yield f"{tool.name}.parameters", tool.parameters, tool.strict
        if calls.answer is not None:
            yield "answer", calls.answer, calls.strict


def parts(
    schema: Any, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Every schema inside of one, with its path."""
    if isinstance(schema, dict):
        yield path, schema
        for key, value in schema.items():
            if key in SCHEMA_MAPS:
                for name, each in value.items():
                    yield from parts(each, (*path, key, name))
            elif key in SCHEMA_LISTS:
                for i, each in enumerate(value):
                    yield from parts(each, (*path, key, str(i)))
            elif key in ("items", "additionalProperties"):
                yield from parts(value, (*path, key))


def _said(message: str) -> str:
    """What the engine says, without where in a text that the client never saw."""
    message = re.sub(r"^at \d+\(\d+\): ", "", message)
    message = message.removeprefix("failed to compile JSON schema: ")
    if message.startswith("oneOf constraints are not supported"):
        return "has alternatives that may hold at the same time, which is not supported; use anyOf"
    return message


def _short(message: str) -> str:
    """The message without the text that it points into."""
    lines = _said(message).splitlines()
    text = " ".join(line.strip() for line in lines if not _POINTS.match(line)).strip()
    return text if len(text) <= 300 else text[:300] + "..."


_POINTS = re.compile(r"\s*\d+ \||\s*\^+\s*$|<non-verbose/>|\s*$")


def die_with_parent() -> None:
    """Has the kernel kill this process when the one that started it is gone (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def main() -> None:
    """Serves until the input ends."""
    die_with_parent()
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    try:
        trial = Trial(msgspec.msgpack.decode(read(stdin), type=Vocabulary))
        with open("/proc/self/statm") as statm:  # noqa: PTH123
            used = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
        write(stdout, Verdict())
        while True:
            write(stdout, trial.judge(msgspec.msgpack.decode(read(stdin), type=Wanted)))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        return


if __name__ == "__main__":
    main()
