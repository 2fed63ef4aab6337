"""The real Gemma 3 270M (GGUF, Q4_K_M) against what transformers computes from the same file.

`data/gemma3_270m/make_reference.py` made the numbers. The file comes from a package in parts (see
serving/gemma3-270m-cpu.yaml); without it these tests are skipped.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import numpy as np
import pytest

from sparkjax import config
from sparkjax.api.app import create_app
from sparkjax.model import Model
from sparkjax.serve import serve_engine, start
from sparkjax.text.tokenizer import Tokenizer
from sparkjax.weights.checkpoint import open_checkpoint

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "serving" / "gemma3-270m-cpu.yaml"


@pytest.fixture(scope="module")
def reference(data: Path) -> dict:
    return json.loads((data / "gemma3_270m" / "reference.json").read_text())


@pytest.fixture(scope="module")
def path() -> Path:
    try:
        return config.locate(config.load(RECIPE, environ={}).model.path)
    except config.ConfigError as error:
        pytest.skip(f"needs the real model ({RECIPE.name} says how): {error}")


def test_tokens_equal_transformers(path: Path, reference: dict, data: Path):
    checkpoint = open_checkpoint(path)
    tokenizer = Tokenizer.from_gguf(checkpoint.file.metadata, str(path))
    assert tokenizer.add_bos
    text = (data / "smollm2" / "text.txt").read_text()
    count = len(reference["text_tokens"])
    assert [tokenizer.bos_id, *tokenizer.encode(text)][:count] == reference["text_tokens"]
    ids = reference["text_tokens"][1:]
    assert text.startswith(tokenizer.decode(ids[:-1]))
    for sample in ("¡Hola! señor", "日本語の文\n\n  two", "a\tb  c 😀", " leading", "x" * 50):
        assert tokenizer.decode(tokenizer.encode(sample)) == sample


def test_the_config_is_that_of_the_real_model(path: Path, reference: dict):
    assert open_checkpoint(path).config["layer_types"] == reference["layer_types"]


@pytest.mark.slow
def test_logits_equal_transformers(path: Path, reference: dict):
    model = Model.load(path, dtype="float32")
    tokens = reference["text_tokens"]
    logits = np.asarray(model.forward(tokens).logits)
    for at, (places, values) in reference["top_logits"].items():
        found = logits[int(at)]
        assert np.abs(found[places] - values).max() <= 1e-3
        assert np.argsort(-found)[: len(places)].tolist() == places
    assert np.abs(model.score(tokens) - np.array(reference["logprobs"])).max() <= 1e-3
    answer = model.greedy(reference["prompt_tokens"], len(reference["answer_tokens"]))
    assert answer.tolist() == reference["answer_tokens"]


@pytest.mark.slow
def test_it_serves_completions_and_refuses_chat(path: Path, reference: dict):
    overrides = ["engine.slots=2", "engine.context=256", "engine.kv_tokens=512", "engine.tiles=[16]",
                 "engine.compilation_cache=null"]  # fmt: skip
    loaded = config.load(RECIPE, overrides, environ={})
    served, service = serve_engine(loaded, *start(loaded))
    app = create_app(served, service, loaded.http)

    async def ask() -> tuple[httpx.Response, httpx.Response]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://local", timeout=600
        ) as client:
            prompt = {
                "model": "gemma",
                "prompt": reference["prompt"],
                "max_tokens": 16,
                "temperature": 0,
            }
            message = {"model": "gemma", "messages": [{"role": "user", "content": "Hi"}]}
            return (
                await client.post("/v1/completions", json=prompt),
                await client.post("/v1/chat/completions", json=message),
            )

    try:
        completion, chat = asyncio.run(ask())
    finally:
        service.shutdown()
    assert completion.status_code == 200, completion.text
    expected = served.tokenizer.decode(reference["answer_tokens"])
    assert completion.json()["choices"][0]["text"] == expected
    assert chat.status_code == 400 and "chat template" in chat.json()["error"]["message"]
