"""`sparkjax plan` with its programs compiled for GB10: every recipe and every manifest.

The default suite compiles a few; all of them, with the time that each takes:

    pytest -m "gb10 and slow" --durations=0 tests/test_plan_compiled.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkjax import config as configuration
from sparkjax.fetch.source import MANIFESTS
from sparkjax.manifests import Manifest, read_manifests
from sparkjax.mesh import gb10
from sparkjax.plan import recipe
from sparkjax.plan.devices import device
from sparkjax.plan.fit import BOXES
from sparkjax.plan.report import Report, plan
from sparkjax.settings import Engine

pytestmark = pytest.mark.gb10
ROOT = Path(__file__).parent.parent
GB10 = device("gb10")
PROGRAMS = ("advance", "choose", "tile")
RECIPES = sorted((ROOT / "serving").glob("*.yaml"))
MANIFEST_NAMES = [m.name for m in read_manifests(MANIFESTS)]
QUICK = {"smollm2-135m-instruct": ("advance", "choose")}
"""Those of the default suite, and which of their programs."""


@pytest.fixture(scope="module", autouse=True)
def compiler():
    try:
        gb10.compile_only_mesh()
    except gb10.Unavailable as error:
        pytest.skip(str(error))


def names(every: list[str]):
    return pytest.mark.parametrize(
        "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in every]
    )


@names([path.stem for path in RECIPES])
def test_every_recipe_compiles_and_fits(name: str):
    loaded = configuration.load(ROOT / "serving" / f"{name}.yaml")
    try:
        manifest = recipe.manifest_of(loaded)
    except recipe.PlanError:
        pytest.skip("the file of the recipe is not on this machine")
    ranks = max(loaded.mesh.tensor_parallel, 1)
    check(manifest, planned(manifest, loaded.engine, ranks, QUICK.get(name, PROGRAMS)))


@names(MANIFEST_NAMES)
def test_every_manifest_compiles_on_the_fewest_boxes(name: str):
    manifest = recipe.manifest_named(name)
    ranks = next(n for n in BOXES if planned(manifest, Engine(), n, ()).fits)
    check(manifest, planned(manifest, Engine(), ranks, QUICK.get(name, PROGRAMS)))


def planned(manifest: Manifest, engine: Engine, ranks: int, programs: tuple[str, ...]) -> Report:
    limits = recipe.limits_of(engine, manifest, ranks)
    return plan(manifest, limits, GB10, ranks, compile=bool(programs), programs=programs)


def check(manifest: Manifest, found: Report) -> None:
    assert found.fits
    for program in found.programs.values():
        assert program.counts.host_calls == 0, "a step does not wait for Python"
    if "choose" in found.programs:
        assert found.programs["choose"].most_launches < 300, "every filter and top log-probabilities"
    step = found.programs["advance"]
    assert step.counts.unknown_trips == 0
    assert any("triton" in kind for kind in step.counts.launches), "kernels of ours are in it"
    assert bool(step.counts.collectives) == (found.ranks > 1)
    text = manifest.config.get("text_config", manifest.config)
    layer = found.memory.of("weights") / text["num_hidden_layers"]
    assert step.temporaries < layer, "no weight is dequantized as a whole"
