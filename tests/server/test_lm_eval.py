"""lm-eval over the API scores as the library does."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LM_EVAL = ROOT / ".venv-clients" / "bin" / "lm_eval"
QUESTIONS = [
    {"question": "The capital of France is", "choices": ["Paris", "a bird"], "answer": 0},
    {"question": "Water is", "choices": ["wet and cold", "seven"], "answer": 0},
    {"question": "Ein kleiner Text über", "choices": ["Möwen 🐦", "nichts"], "answer": 1},
]


@pytest.mark.clients
def test_lm_eval_scores_like_the_library(server, tiny, tmp_path):
    from sparkjax import Model

    if not LM_EVAL.exists():
        pytest.skip("needs lm-eval: make test-clients")
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(each) + "\n" for each in QUESTIONS))
    task = {
        "task": "tiny_choice", "dataset_path": "json", "test_split": "test",
        "dataset_kwargs": {"data_files": {"test": str(data)}}, "output_type": "multiple_choice",
        "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    (tmp_path / "tiny_choice.yaml").write_text(json.dumps(task))
    arguments = {
        "model": server.model, "base_url": f"{server.url}/v1/completions", "tokenizer_backend": "remote",
        "tokenized_requests": "True", "num_concurrent": "2", "max_retries": "1",
    }  # fmt: skip
    done = subprocess.run(
        [LM_EVAL, "--model", "local-completions", "--model_args",
         ",".join(f"{k}={v}" for k, v in arguments.items()), "--tasks", "tiny_choice",
         "--include_path", tmp_path, "--output_path", tmp_path / "out", "--log_samples"],
        cwd=tmp_path, env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (file,) = (tmp_path / "out").rglob("samples_*.jsonl")
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(samples) == len(QUESTIONS)
    model = Model.load(tiny)
    encode = model.tokenizer.encode
    for sample in samples:
        doc = sample["doc"]
        for choice, ((logprob, _),) in zip(doc["choices"], sample["resps"], strict=True):
            context = encode(doc["question"])
            joint = encode(f"{doc['question']} {choice}")
            assert joint[: len(context)] == context
            expected = float(model.score(joint)[len(context) - 1 :].sum())
            assert float(logprob) == pytest.approx(expected, abs=1e-3)
