"""Real GGUF files against transformers on the same dequantized weights, live."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sparkjax import config
from sparkjax.model import Model
from sparkjax.verify import errors

ROOT = Path(__file__).parents[2]
RECIPES = ("smollm2-cpu", "gemma3-270m-cpu")


@pytest.mark.parity
@pytest.mark.parametrize("recipe", RECIPES)
def test_logits_equal_transformers(recipe):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    try:
        path = config.locate(
            config.load(ROOT / "serving" / f"{recipe}.yaml", environ={}).model.path
        )
    except config.ConfigError as error:
        pytest.skip(f"needs the real model: {error}")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    tokens = np.random.default_rng(5).integers(4, theirs.config.vocab_size, 24)
    with torch.inference_mode():
        reference = theirs(torch.tensor(tokens[None])).logits[0].numpy()
    del theirs
    out = np.asarray(Model.load(path, dtype="float32").forward(tokens).logits)
    relative, absolute = errors(out, reference)
    assert relative <= 1e-4 and absolute <= 1e-3 * np.abs(reference).max(), (relative, absolute)
