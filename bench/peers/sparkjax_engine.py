"""sparkjax at `Engine.tick`, without HTTP."""

from __future__ import annotations

import sys
import time

import worker

import sparkjax
from sparkjax.engine.engine import Engine
from sparkjax.engine.limits import make_limits
from sparkjax.engine.records import Submit


def main() -> None:
    model = sparkjax.load(sys.argv[1])
    engine = Engine(model, make_limits(model, slots=8, context=2048))
    engine.runner.warm()

    def run(prompts: list[list[int]], tokens: int) -> float:
        submits = tuple(Submit(engine.new_id(), tuple(p), tokens) for p in prompts)
        first: dict[int, float] = {}
        produced = 0
        begin = time.perf_counter()
        events = engine.tick(submits)
        while True:
            now = time.perf_counter()
            for event in events:
                if event.id in first:
                    produced += len(event.tokens) if len(first) == len(submits) else 0
                else:
                    first[event.id] = now
                    if len(first) == len(submits):
                        running = now
            if engine.idle:
                break
            events = engine.tick()
        if tokens == 1:
            return len(prompts[0]) / (running - begin)
        return produced / (time.perf_counter() - running)

    worker.serve({"sparkjax": sparkjax.__version__, "at": "Engine.tick"}, run)


main()
