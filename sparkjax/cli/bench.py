"""`sparkjax bench`: load on a running server, and what its clients saw."""

from __future__ import annotations

import queue
import random
import statistics
import threading
import time
from typing import Any, NamedTuple

from .client import Client


class Served(NamedTuple):
    """One request as its client saw it, in seconds from the start of the measurement."""

    sent: float
    first: float
    done: float
    prompt: int
    tokens: int


def measure(
    client: Client, model: str, streams: int, requests: int, prompt_tokens: int, max_tokens: int
) -> dict[str, Any]:
    """Sends `requests` different prompts, `streams` at a time, and sums up.

    Prompts are random token ids, so their length is exact and no cache helps. The answers may end
    early; tokens are counted as the server reports them.
    """
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(requests):
        todo.put(number)
    served: list[Served] = []
    errors: list[BaseException] = []
    started = time.perf_counter()

    def work() -> None:
        try:
            while not errors:
                try:
                    number = todo.get_nowait()
                except queue.Empty:
                    return
                prompt = random.Random(number).choices(range(1000, 20000), k=prompt_tokens)
                served.append(_request(client, model, prompt, max_tokens, started))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(streams, requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return _summary(served, streams, max_tokens)


def _request(
    client: Client, model: str, prompt: list[int], max_tokens: int, started: float
) -> Served:
    sent = time.perf_counter() - started
    first: float | None = None
    usage: dict[str, int] = {}
    for chunk in client.complete(model, prompt, max_tokens=max_tokens, temperature=0):
        if first is None and (chunk.text or chunk.finish):
            first = time.perf_counter() - started
        usage = chunk.usage or usage
    done = time.perf_counter() - started
    return Served(
        sent, first or done, done, usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
    )


def _summary(served: list[Served], streams: int, max_tokens: int) -> dict[str, Any]:
    wall = max(s.done for s in served) - min(s.sent for s in served)
    between = [(s.done - s.first) / (s.tokens - 1) for s in served if s.tokens > 1]
    return {
        "requests": len(served),
        "streams": streams,
        "prompt_tokens": sum(s.prompt for s in served),
        "completion_tokens": sum(s.tokens for s in served),
        "max_tokens": max_tokens,
        "seconds": wall,
        "output_tokens_per_second": sum(s.tokens for s in served) / wall,
        "total_tokens_per_second": sum(s.tokens + s.prompt for s in served) / wall,
        "first_token_seconds": _spread([s.first - s.sent for s in served]),
        "between_tokens_seconds": _spread(between),
        "request_seconds": _spread([s.done - s.sent for s in served]),
    }


def _spread(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    ordered = sorted(values)
    return {
        "p50": statistics.median(ordered),
        "p99": ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))],
        "max": ordered[-1],
    }
