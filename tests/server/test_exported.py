"""A model that was exported to Orbax, behind HTTP."""

from __future__ import annotations

import httpx
import pytest

from sparkjax.export import export

pytest.importorskip("orbax.checkpoint")


@pytest.mark.slow
def test_an_exported_model_answers_as_the_published_one(server, start, tiny, tmp_path):
    """The same greedy tokens and log-probabilities, with the tokenizer and template that came along."""

    def ask(url: str, model: str) -> tuple[str, list]:
        body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12,
                "temperature": 0, "logprobs": True}  # fmt: skip
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300)
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        return choice["message"]["content"], choice["logprobs"]["content"]

    out = export(tiny, tmp_path / "exported")
    with start(out) as exported:
        assert ask(exported.url, exported.model) == ask(server.url, server.model)
