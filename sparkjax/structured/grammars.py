"""Compiled grammars over one vocabulary: made once, kept while they are used."""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import llguidance

from .budget import Budget
from .closing import Closing
from .matcher import Alphabet, GrammarError, Matcher
from .shapes import Shape, shape_of

KEPT = 64
"""Compiled grammars that are kept for the next request with the same text."""

USES = 32
"""Answers that share one compiled grammar: they share the states that its lexer has been in, too,
which `LIMITS` counts."""

LIMITS = llguidance.LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    precompute_large_lexemes=False,
    verbose_errors=False,
)
"""Counted, never timed: every rank meets a limit at the same token."""


class _Words:
    """The vocabulary in the shape that llguidance reads."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], special: Sequence[int], end: int):
        self.tokens, self.special_token_ids, self.eos_token_id = list(tokens), list(special), end

    def __call__(self, raw: bytes) -> list[int]:
        # Asked only for text that a grammar forces, and forcing is off (see `sources`).
        raise GrammarError("forced text has no tokens here")


def tokenizer(tokens: Sequence[bytes], special: Sequence[int], ends: Sequence[int]) -> Any:
    """An `llguidance.LLTokenizer` over the ids 0 .. len(tokens) - 1.

    Args:
      special: ids that are no text; grammars name them by `<[id]>`.
      ends: ids that end an answer, at least one; they are special too.
    """
    if not ends:
        raise GrammarError("the model has no token that ends an answer")
    words = _Words(tokens, sorted({*special, *ends}), ends[0])
    return llguidance.LLTokenizer(
        llguidance.TokenizerWrapper(words), n_vocab=len(tokens), eos_token=list(ends)
    )


class Compiled(NamedTuple):
    """A grammar at its start (an `llguidance.LLMatcher`), and its shape."""

    automaton: Any
    shape: Shape


@dataclasses.dataclass
class _Kept:
    """A grammar, compiled or about to be, and how many answers began with it."""

    compiled: Future[Compiled]
    uses: int = 0


class Grammars:
    """The grammars of one model. Any thread may call any method.

    Args:
      tokens, special, ends: see `tokenizer`.

    Attributes:
      special: ids that are no text.
      alphabet, closing: what masks and ways to the end are made of.
    """

    def __init__(self, tokens: Sequence[bytes], special: Sequence[int], ends: Sequence[int]):
        self.special = tuple(special)
        self.alphabet = Alphabet.of(tokens, ends)
        self._tokenizer = tokenizer(tokens, special, ends)
        self.closing = Closing(tokens, special, ends)
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar")

    @classmethod
    def of(cls, text_tokenizer: Any, vocab: int, ends: Sequence[int]) -> Grammars:
        """Those of a `sparkjax.text.tokenizer.Tokenizer` under a model of `vocab` ids."""
        vocabulary = text_tokenizer.vocabulary
        tokens = [vocabulary.bytes_of(i) for i in range(vocab)]
        special = [i for i in vocabulary.control | vocabulary.special if i < vocab]
        return cls(tokens, special, [i for i in ends if i < vocab])

    def prepare(self, source: str) -> Future[Compiled]:
        """Begins to compile a grammar, unless it is there."""
        with self._lock:
            found = self._kept.get(source)
            if found is None:
                found = self._kept[source] = _Kept(self._pool.submit(self._compile, source))
                while len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(source)
        return found.compiled

    def matcher(self, source: str, after: str = "", tokens: int | None = None) -> Matcher:
        """A matcher at the beginning of an answer; waits for the grammar's compilation.

        Args:
          source: Lark text, as `sources` writes it.
          after: see `Matcher`.
          tokens: how many the answer may have, or None.

        Raises:
          GrammarError: the grammar is none, or beyond `LIMITS`.
        """
        automaton, shape = self.prepare(source).result()
        with self._lock:
            kept = self._kept.get(source)
            if kept is not None:
                kept.uses += 1
                if kept.uses >= USES:
                    del self._kept[source]
        budget = None if tokens is None else Budget(self.closing, source, shape, tokens)
        return Matcher(automaton.deep_copy(), self.alphabet, after, budget)

    def forget(self, source: str) -> None:
        """A grammar is compiled anew for its next answer: one that met a limit would meet it in
        every answer to come."""
        with self._lock:
            self._kept.pop(source, None)

    def _compile(self, source: str) -> Compiled:
        return Compiled(compile_grammar(self._tokenizer, source), shape_of(source))

    def close(self) -> None:
        """Ends the thread."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def compile_grammar(over: Any, source: str) -> Any:
    """An `llguidance.LLMatcher` at its start.

    Raises:
      GrammarError: the grammar is none, or beyond `LIMITS`.
    """
    automaton = llguidance.LLMatcher(over, source, log_level=0, limits=LIMITS)
    if automaton.is_error():
        raise GrammarError(automaton.get_error().strip())
    return automaton
