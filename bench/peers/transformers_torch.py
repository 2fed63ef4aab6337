"""transformers on torch: the same file dequantized to float32, greedy with its own cache."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import transformers
import worker


def main() -> None:
    path, threads = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()

    @torch.inference_mode()
    def run(prompts: list[list[int]], tokens: int) -> float:
        ids = torch.tensor(prompts)
        begin = time.perf_counter()
        out = model(ids, use_cache=True, logits_to_keep=1)
        running = time.perf_counter()
        if tokens == 1:
            return len(prompts[0]) / (running - begin)
        for _ in range(tokens - 1):
            next_ids = out.logits[:, -1].argmax(-1, keepdim=True)
            out = model(next_ids, past_key_values=out.past_key_values, use_cache=True)
        return (tokens - 1) * len(prompts) / (time.perf_counter() - running)

    about = {"transformers": transformers.__version__, "torch": torch.__version__, "threads": threads}
    worker.serve(about, run)


main()
