"""Constraints: schemas, patterns and grammars, good and bad, through the process that judges them."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "structured"))

import schemas

from sparkjax.structured import judge as judges
from sparkjax.structured import tools
from sparkjax.structured.calls import Calls, Offered
from sparkjax.structured.judge import Judge
from sparkjax.structured.matcher import GrammarError
from sparkjax.structured.schema import SchemaError
from sparkjax.structured.sources import Wanted
from sparkjax.structured.worker import Vocabulary

from .bodies import broken
from .texts import Check

PATTERNS = ["a", "b*", "(a|b)", "[a-z]{2,5}", "\\d+", "^", "$", "(?=a)", "\\p{L}", "(", ")", "{3}", "[", "]",
            "|", "\\b", "(?i)", ".", "{1000}", "{0,}", "\\x{41}", "\\u0041", "+?", "(?P<n>x)", "\\1", "é", "/"]  # fmt: skip
RULES = ["start: a b", "start: a", "a: B+", 'b: "x" | a', "B: /[a-z]+/", "start: %json {}", "a: <[5]>",
         "b: (a)*", "B[lazy]: /x+/", '%ignore / /', 'a: "x"i', "a{3}: b", "B: C", "root ::= [a-z]+ | root", "\n"]  # fmt: skip


@contextlib.contextmanager
def grammars() -> Iterator[Check]:
    """A constraint is a grammar or a refusal, within the limits of time and memory."""
    judge = Judge(Vocabulary(300, {0: b"<end>", 7: b"<tag>"}, (0,)))

    def check(rng: random.Random) -> None:
        with contextlib.suppress(SchemaError, GrammarError):
            judge.source(wanted(rng)).result(judges.PATIENCE + judges.START_SECONDS)

    yield check
    judge.close()


def wanted(rng: random.Random) -> Wanted:
    """Some constraint."""
    match rng.randrange(5):
        case 0:
            return Wanted("regex", "".join(rng.choices(PATTERNS, k=rng.randint(1, 8))))
        case 1:
            return Wanted("lark", "\n".join(rng.choices(RULES, k=rng.randint(1, 6))))
        case 2:
            name = rng.choice(list(tools.WRITERS))
            offered = tuple(
                Offered(f"f{i}", schema(rng), rng.random() < 0.3) for i in range(rng.randint(1, 2))
            )
            return Wanted("calls", plain(Calls(name, offered, free=rng.random() < 0.3)))
        case _:
            return Wanted("json_schema", schema(rng), rng.random() < 0.5)


def plain(calls: Calls) -> Any:
    """As the API hands it on."""
    import msgspec

    return msgspec.to_builtins(calls)


def schema(rng: random.Random) -> dict[str, Any]:
    """A schema, often with something wrong in it."""
    made = schemas.schema(rng.randrange(10_000))
    return broken(rng, {"model": "", **made}) if rng.random() < 0.7 else made
