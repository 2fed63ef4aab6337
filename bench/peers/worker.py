"""The worker side of cpu_peers: reads tasks, writes results marked with "@"."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

VOCABULARY = 40000
"""Prompts are pseudo-random ids below this: the same for every engine."""


def prompt(length: int, seed: int) -> list[int]:
    """`length` token ids that depend on the seed alone."""
    state, ids = seed * 2654435761 % 2**32 + 1, []
    for _ in range(length):
        state = (state * 1664525 + 1013904223) % 2**32
        ids.append(100 + (state >> 8) % (VOCABULARY - 100))
    return ids


def serve(about: dict[str, Any], run: Callable[..., float | None]) -> None:
    """Answers tasks with `run(prompts, tokens) -> tokens a second`.

    With one token to generate, the rate is that of the prompt's tokens; else of the generated
    ones after the first.
    """
    print("@" + json.dumps(about), flush=True)
    for number, line in enumerate(sys.stdin):
        task = json.loads(line)
        prompts = [prompt(task["prompt"], number * 100 + s) for s in range(task["streams"])]
        rate = run(prompts, task["tokens"])
        print("@" + json.dumps(None if rate is None else {"tokens_per_second": rate}), flush=True)
