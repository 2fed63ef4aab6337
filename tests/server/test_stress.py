"""Random traffic through real HTTP: company, cancels and disconnects change nothing for others."""

from __future__ import annotations

import asyncio
import json
import random
import time
from typing import Any

import httpx
import pytest

PROMPTS = 1500
"""The longest prompt, in tokens."""
VOCABULARY = 384


def random_request(rng: random.Random) -> dict[str, Any]:
    length = PROMPTS if rng.random() < 0.05 else min(PROMPTS, int(rng.expovariate(1 / 80)) + 1)
    body: dict[str, Any] = {
        "prompt": [rng.randrange(3, VOCABULARY) for _ in range(length)],
        "max_tokens": rng.randint(1, 40),
        "stream": rng.random() < 0.5,
        "logprobs": rng.choice([None, 0, 3]),
    }
    if rng.random() < 0.5:
        body["temperature"] = 0
    else:
        body |= {
            "temperature": rng.choice([0.5, 1.0, 1.5]),
            "top_p": rng.choice([1.0, 0.9]),
            "seed": rng.getrandbits(40),
            "presence_penalty": rng.choice([0, 0.4]),
        }
    if rng.random() < 0.3:
        body["stop"] = rng.sample(["a", "th", "e ", "\n", "The", "x"], rng.randint(1, 3))
    return body


def fold(chunks: list[dict]) -> dict[str, Any]:
    """A streamed answer as the non-streamed one would be."""
    text, tokens, logprobs, finish = "", [], [], None
    for chunk in chunks:
        for choice in chunk["choices"]:
            text += choice["text"]
            if choice.get("logprobs"):
                tokens += choice["logprobs"]["tokens"]
                logprobs += choice["logprobs"]["token_logprobs"]
            finish = choice["finish_reason"] or finish
    return {"text": text, "tokens": tokens, "logprobs": logprobs, "finish": finish}


async def ask(client: httpx.AsyncClient, model: str, body: dict, leave: float | None) -> dict | None:
    """The answer; None if the client left after `leave` seconds."""
    body = {"model": model, **body}

    async def whole() -> dict:
        if not body["stream"]:
            response = await client.post("/v1/completions", json=body)
            assert response.status_code == 200, response.text
            return fold([response.json()])
        chunks = []
        async with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    chunk = json.loads(line[6:])
                    assert "error" not in chunk, chunk
                    chunks.append(chunk)
        assert line == "data: [DONE]" or not line
        return fold(chunks)

    if leave is None:
        return await whole()
    try:
        return await asyncio.wait_for(whole(), leave)
    except TimeoutError:
        return None


async def a_round(url: str, model: str, bodies: list[dict], rng: random.Random) -> list[dict | None]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        jobs = []
        for body in bodies:
            leave = rng.uniform(0.0, 2.0) if rng.random() < 0.25 else None
            jobs.append(asyncio.create_task(ask(client, model, body, leave)))
            await asyncio.sleep(rng.expovariate(1 / 0.01))
        return await asyncio.gather(*jobs)


def settled(server: Any, seconds: float) -> dict[str, float]:
    """The gauges once nothing runs or waits any more, or after the bound."""
    deadline = time.monotonic() + seconds
    while True:
        metrics = server.metrics()
        busy = metrics["sparkjax:num_requests_running"] + metrics["sparkjax:num_requests_waiting"]
        if not busy or time.monotonic() > deadline:
            return metrics


@pytest.mark.parametrize("count, rounds", [(30, 1), pytest.param(200, 3, marks=pytest.mark.slow)])
def test_company_disconnects_and_stops_change_nothing(server, count: int, rounds: int):
    rng = random.Random(count)
    model = server.model
    compiled = server.metrics()["sparkjax:compilations_total"]
    usage = []
    for _ in range(rounds):
        bodies = [random_request(rng) for _ in range(count)]
        found = asyncio.run(a_round(server.url, model, bodies, rng))
        metrics = settled(server, 3)
        assert metrics["sparkjax:num_requests_running"] == 0
        assert metrics["sparkjax:num_requests_waiting"] == 0
        assert metrics["sparkjax:kv_cache_usage_perc"] == 0

        async def alone(bodies=bodies, found=found) -> None:
            async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
                for body, answer in zip(bodies, found, strict=True):
                    if answer is not None:
                        other = {**body, "stream": not body["stream"]}
                        assert await ask(client, model, other, None) == answer

        asyncio.run(alone())
        usage.append(server.resources())
    assert server.metrics()["sparkjax:compilations_total"] == compiled
    if rounds > 1:
        assert usage[-1]["rss"] < usage[0]["rss"] * 1.05 + 16384
        assert usage[-1]["threads"] <= usage[0]["threads"] + 2
        assert usage[-1]["files"] <= usage[0]["files"] + 8


def test_thirty_clients_that_vanish_leave_nothing_behind(server):
    async def vanish() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            body = {"prompt": [5] * 700, "max_tokens": 800, "temperature": 0, "stream": True}
            jobs = [
                asyncio.create_task(ask(client, server.model, body, leave=None)) for _ in range(30)
            ]
            await asyncio.sleep(0.5)
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)

    asyncio.run(vanish())
    metrics = settled(server, 3)
    assert metrics["sparkjax:num_requests_running"] == 0
    assert metrics["sparkjax:num_requests_waiting"] == 0
    assert metrics["sparkjax:kv_cache_usage_perc"] == 0


def test_eight_identical_prompts_at_once_get_one_answer(server):
    body = {"prompt": list(range(10, 150)), "max_tokens": 30, "temperature": 0, "stream": False, "logprobs": 2}

    async def eight() -> list:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            return await asyncio.gather(*(ask(client, server.model, body, None) for _ in range(8)))

    answers = asyncio.run(eight())
    assert all(answer == answers[0] for answer in answers)
