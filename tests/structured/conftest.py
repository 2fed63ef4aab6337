"""An engine over a tiny model with a byte-level tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sparkjax import compiles
from sparkjax.engine.engine import Engine
from sparkjax.engine.limits import make_limits
from sparkjax.model import Model

TESTS = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("tiny")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(TESTS / "golden" / "llama" / name, folder / name)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TESTS / "data" / "tiny_chat" / name, folder / name)
    return Model.load(folder)


@pytest.fixture(scope="session")
def engine(model: Model) -> Engine:
    engine = Engine(model, make_limits(model, slots=4, context=2048, tiles=(16,), page_size=16))
    engine.runner.warm()
    compiles.count()
    return engine
