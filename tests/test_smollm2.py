"""The real SmolLM2-135M-Instruct against what transformers computes from the same file.

`data/smollm2/make_reference.py` made the numbers.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from sparkjax.model import Model


@pytest.fixture(scope="module")
def reference(data: Path) -> dict:
    return json.loads((data / "smollm2" / "reference.json").read_text())


@pytest.fixture(scope="module")
def model(smollm2_path: Path) -> Model:
    return Model.load(smollm2_path, dtype="float32")


def test_tokens_equal_transformers(model: Model, reference: dict, data: Path):
    text = (data / "smollm2" / "text.txt").read_text()
    assert model.encode(text)[: len(reference["text_tokens"])] == reference["text_tokens"]


def test_teacher_forced_log_probabilities_equal_transformers(model: Model, reference: dict):
    found = model.score(reference["text_tokens"])
    assert np.abs(found - np.array(reference["logprobs"])).max() <= 1e-3


def test_greedy_answer_equals_transformers(model: Model, reference: dict):
    found = model.generate(reference["prompt_tokens"], max_tokens=32)
    assert list(found.tokens) == reference["answer_tokens"]
    assert found.text == reference["answer"] == "The primary colors are: Red, Blue, and Yellow."
    assert found.finish == "stop"
