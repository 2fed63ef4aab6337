"""Every family through the engine: two prompts in company give the golden continuations.

Families that look tokens up on the host wait for them; the others run one tick ahead.
"""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

from sparkjax import compiles
from sparkjax.engine.engine import Engine
from sparkjax.engine.limits import make_limits
from sparkjax.engine.records import Submit
from sparkjax.model import Model
from sparkjax.weights.safetensors import SafetensorsFile

GOLDEN = Path(__file__).parent.parent / "golden"
FAMILIES = sorted(path.name for path in GOLDEN.iterdir())
DEFAULT = ("qwen4_exp",)
PROMPTS = 2


@pytest.fixture(autouse=True)
def forget():
    yield
    jax.clear_caches()


@pytest.mark.parametrize(
    "family",
    [f if f in DEFAULT else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES],
)
def test_the_engine_gives_the_golden_continuation(family: str):
    golden = SafetensorsFile(GOLDEN / family / "golden.safetensors")
    model = Model.load(GOLDEN / family, dtype="float32")
    engine = Engine(model, make_limits(model, slots=4, context=512, tiles=(16, 64), rows=(4,)))
    engine.runner.warm()
    submits = []
    for i in range(PROMPTS):
        tokens = golden.read(f"prompt_{i}.input_ids").tolist()
        count = len(golden.read(f"prompt_{i}.greedy"))
        submits.append(Submit(engine.new_id(), tuple(tokens), count))
    found: dict[int, list[int]] = {s.id: [] for s in submits}
    with compiles.forbidden():
        events = engine.tick(tuple(submits))
        while True:
            for event in events:
                found[event.id] += event.tokens
            if engine.idle:
                break
            events = engine.tick()
    for i, submit in enumerate(submits):
        assert found[submit.id] == golden.read(f"prompt_{i}.greedy").tolist()
    engine.scheduler.check()
