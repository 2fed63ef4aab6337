"""Makes reference.json: what transformers computes from the same GGUF file in float32.

Run where torch, transformers and gguf are installed:

    python make_reference.py /path/to/SmolLM2-135M-Instruct.Q4_1.gguf

The text is this repository's own (English prose written for it); log-probabilities are natural
logarithms, entry i of token i + 1.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import transformers

HERE = Path(__file__).parent
QUESTION = "Name three primary colors."
TOKENS = 512


def main(path: Path) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(2)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()

    text = (HERE / "text.txt").read_text()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"][:TOKENS]
    assert len(ids) == TOKENS, len(ids)
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0].double()
    logprobs = torch.log_softmax(logits, -1)[torch.arange(TOKENS - 1), ids[1:]]

    chat = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    with torch.inference_mode():
        out = model.generate(torch.tensor([prompt]), max_new_tokens=32, do_sample=False)
    answer = out[0, len(prompt) :].tolist()
    reference = {
        "made_with": {"transformers": transformers.__version__, "torch": torch.__version__},
        "file": path.name,
        "text_tokens": ids,
        "logprobs": [round(x, 6) for x in logprobs.tolist()],
        "question": QUESTION,
        "prompt_tokens": prompt,
        "answer_tokens": answer,
        "answer": tokenizer.decode(answer, skip_special_tokens=True),
    }
    (HERE / "reference.json").write_text(json.dumps(reference) + "\n")
    print(reference["answer"], sum(reference["logprobs"]) / (TOKENS - 1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
