"""llama.cpp through llama-cpp-python, one stream."""

from __future__ import annotations

import importlib.metadata
import sys
import time

import llama_cpp
import numpy as np
import worker


def main() -> None:
    threads = int(sys.argv[2])
    model = llama_cpp.Llama(
        sys.argv[1], n_ctx=2048, n_threads=threads, n_threads_batch=threads, n_batch=512, verbose=False
    )

    def run(prompts: list[list[int]], tokens: int) -> float | None:
        if len(prompts) > 1:
            return None
        model.reset()
        begin = time.perf_counter()
        model.eval(prompts[0])
        running = time.perf_counter()
        if tokens == 1:
            return len(prompts[0]) / (running - begin)
        for _ in range(tokens - 1):
            logits = np.ctypeslib.as_array(model._ctx.get_logits_ith(-1), (model.n_vocab(),))
            model.eval([int(logits.argmax())])
        return (tokens - 1) / (time.perf_counter() - running)

    about = {"llama-cpp-python": importlib.metadata.version("llama-cpp-python"), "threads": threads}
    worker.serve(about, run)


main()
