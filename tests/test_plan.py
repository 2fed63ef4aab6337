"""`sparkjax plan`: sizes against arrays, published figures, and refusals that name what fits."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import jax
import pytest
from typer.testing import CliRunner

from sparkjax import config as configuration
from sparkjax.cli.app import app
from sparkjax.engine import memory
from sparkjax.fetch.source import MANIFESTS
from sparkjax.manifests import read_manifests
from sparkjax.model import Model, ignored
from sparkjax.models import params as declarations
from sparkjax.models import tables
from sparkjax.plan import cost, recipe
from sparkjax.plan.devices import FOLDER, device, file_name, read_device
from sparkjax.plan.fit import nearest, shortfall
from sparkjax.plan.measure import write
from sparkjax.plan.on_disk import described
from sparkjax.plan.report import plan
from sparkjax.plan.weights import abstract_weights
from sparkjax.settings import Engine
from sparkjax.weights.load import load_params

GB10 = device("gb10")
# GB that a rank reads for a token, as engines for the same boxes published it (same checkpoints).
PUBLISHED = {
    ("glm-5.3-flash-fp8", 4): 5.86,
    ("qwen3.8-flash-next-fp8", 2): 6.20,
    ("qwen3.8-flash-next-fp8", 4): 3.83,
    ("qwen3.8-flash-next-nvfp4", 1): 10.05,
    ("glm-4.7-nvfp4", 4): 9.7,
    ("glm-5.3-int4-int8mix", 4): 10.1,
    ("deepseek-v4.1-flash", 4): 3.83,
    ("mimo-v2.6-flash", 4): 2.96,
    ("mimo-v2.6-flash", 2): 5.83,
    ("qwen3.8-27b-fp8", 1): 27.0,
    ("qwen3.8-27b-fp8", 4): 6.9,
}


def planned(name: str, ranks: int, **engine):
    manifest = recipe.manifest_named(name)
    limits = recipe.limits_of(Engine(**engine), manifest, ranks)
    return plan(manifest, limits, GB10, ranks, compile=False)


@pytest.mark.parametrize("name,ranks", PUBLISHED)
def test_bytes_a_token_are_the_published_ones_within_a_tenth(name: str, ranks: int):
    report = planned(name, ranks)
    assert report.token_bytes / 1e9 == pytest.approx(PUBLISHED[name, ranks], rel=0.1)


# Laying their large packed matrices over ranks takes many seconds.
HEAVY = ("glm-5.3-int4-int8mix", "qwen3.8-27b-nvfp4")


@pytest.mark.parametrize(
    "manifest",
    [
        pytest.param(m, id=m.name, marks=[pytest.mark.slow] if m.name in HEAVY else [])
        for m in read_manifests(MANIFESTS)
    ],
)
def test_every_manifest_is_sized(manifest):
    totals = []
    for ranks in (1, 3):
        report = planned(manifest.name, ranks, kv_tokens=8192)
        assert report.memory.of("weights") > 0 and report.token_bytes > 0
        totals.append(report.memory.of("weights"))
    assert totals[0] > totals[1], "more ranks, less for each"
    if manifest.size_gb:
        # Prediction layers and vision are not in it; the n-gram tables (FP8) stay in the file.
        config = manifest.family.read_config(manifest.config)
        mapped = tables.declared(manifest.family, config).values()
        held = totals[0] + sum(math.prod(t.shape) for t in mapped if isinstance(t, tables.Table))
        assert held == pytest.approx(manifest.size_gb * 1e9, rel=0.1)


@pytest.mark.parametrize("family", ["llama", "glm5_next"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_abstract_weights_are_what_the_loader_makes(family: str, ranks: int):
    model = Model.load(Path(__file__).parent / "golden" / family, ranks=ranks, dtype="float32")
    manifest = dataclasses.replace(
        recipe.manifest_named("smollm2-135m-instruct"), config=model.checkpoint.config, stored=()
    )
    tree = model.family.declare(model.config, ranks)
    weights = abstract_weights(manifest, tree, ranks, "float32")
    for path, leaf in declarations.leaves_of(weights):
        loaded = dict(declarations.leaves_of(model.params))[path]
        assert jax.tree.map(lambda s: s.shape, leaf) == jax.tree.map(lambda a: a.shape, loaded)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("family", ["llama", "glm5_next"])
def test_a_checkpoint_on_disk_is_planned_as_the_loader_makes_it(family: str, ranks: int):
    model = Model.load(Path(__file__).parent / "golden" / family, ranks=ranks, dtype="float32")
    manifest = described(model.checkpoint.path)
    tree = model.family.declare(model.config, ranks)
    weights = abstract_weights(manifest, tree, ranks)
    kept = load_params(
        tree, model.checkpoint, ranks=ranks, mesh=model.mesh,
        ignored=ignored(model.family, model.config),
    )  # fmt: skip
    loaded = dict(declarations.leaves_of(kept))
    for path, leaf in declarations.leaves_of(weights):
        assert jax.tree.map(lambda s: (s.shape, s.dtype), leaf) == jax.tree.map(
            lambda a: (a.shape, a.dtype), loaded[path]
        )


def test_a_gguf_file_of_a_recipe_is_planned_in_its_own_formats(smollm2_path, tmp_path: Path):
    path = tmp_path / "r.yaml"
    path.write_text(f"model: {{path: {smollm2_path}}}\nengine: {{context: 2048}}\n")
    found = CliRunner().invoke(app, ["plan", "-c", str(path), "--no-compile", "--json"])
    values = json.loads(found.stdout)
    assert values["fits"] and values["model"] == smollm2_path.name
    weights = sum(i["nbytes"] for i in values["memory"]["items"] if i["kind"] == "weights")
    assert weights == pytest.approx(smollm2_path.stat().st_size, rel=0.1)


def test_a_recipe_that_cannot_fit_is_refused_and_what_is_suggested_fits():
    manifest = recipe.manifest_named("glm-5.3-flash-fp8")

    def again(ranks: int, kv_tokens: int | None = None):
        limits = recipe.limits_of(Engine(slots=8, context=131072), manifest, ranks, kv_tokens)
        return plan(manifest, limits, GB10, ranks, compile=False)

    report = again(2)
    assert not report.fits and "GiB too much" in shortfall(report)
    suggestions = nearest(report, again)
    assert [s.settings for s in suggestions] == ["mesh.tensor_parallel: 3"]
    assert all(s.report.fits for s in suggestions)
    # Boxes that hold the weights but not the pool get a smaller one.
    limits = recipe.limits_of(Engine(slots=64, context=131072), manifest, 4)
    report = plan(manifest, limits, GB10, 4, compile=False)
    assert not report.fits

    def pools(ranks: int, kv_tokens: int | None = None):
        engine = Engine(slots=64, context=131072)
        return plan(
            manifest, recipe.limits_of(engine, manifest, ranks, kv_tokens), GB10, ranks, compile=False
        )

    first = nearest(report, pools)[0]
    assert first.settings == f"engine.kv_tokens: {report.pool_tokens}" and first.report.fits
    page = memory.largest_pool(
        manifest.family.declare_caches(manifest.family.read_config(manifest.config), 4),
        limits.page_size, limits.slots, 4, "bfloat16", 0,
    ).page  # fmt: skip
    assert first.report.memory.free < page, "not one page more"


def test_more_streams_and_longer_prompts_cost_more():
    report = planned("deepseek-v4-flash", 4, context=65536)
    steps = [report.decode[n].seconds for n in (1, 2, 4, 8)]
    assert steps == sorted(steps) and report.decode[8].tokens_per_second > report.decode[1].tokens_per_second
    prompts = [report.prefill[n].seconds for n in (2048, 8192, 32768)]
    assert prompts == sorted(prompts)
    assert cost.distinct(256, 6, 1) == pytest.approx(6) and cost.distinct(256, 6, 10_000) == pytest.approx(256)


def test_the_command_prints_json_and_refuses_with_a_table(tmp_path: Path):
    runner = CliRunner()
    fine = runner.invoke(app, ["plan", "-m", "qwen3.8-27b-fp8", "--boxes", "1", "--no-compile", "--json"])
    values = json.loads(fine.stdout)
    assert fine.exit_code == 0 and values["fits"] and values["projected"]
    assert values["decode"]["1"]["tokens_per_second"] == pytest.approx(8.5, abs=0.5)
    recipe_file = tmp_path / "r.yaml"
    recipe_file.write_text("model: {manifest: glm-5.3-flash-fp8}\nmesh: {tensor_parallel: 1}\n")
    refused = runner.invoke(app, ["plan", "-c", str(recipe_file), "--no-compile"])
    assert refused.exit_code == 1 and "does not fit on 1 x NVIDIA GB10" in refused.stdout
    assert "fits with mesh.tensor_parallel: 3" in refused.stdout
    unknown = runner.invoke(app, ["plan", "-m", "glm-6"])
    assert unknown.exit_code != 0 and "glm-5.3-flash-fp8" in unknown.output


def test_a_recipe_finds_its_manifest_by_repository(tmp_path: Path):
    path = tmp_path / "r.yaml"
    path.write_text("model: {path: 'hf:deepseek-ai/DeepSeek-V4-Flash-0731'}\n")
    assert recipe.manifest_of(configuration.load(path)).name == "deepseek-v4-flash"
    path.write_text("model: {path: 'hf:nobody/nothing'}\n")
    with pytest.raises(recipe.PlanError, match=r"model\.manifest"):
        recipe.manifest_of(configuration.load(path))


def test_a_device_file_with_a_wrong_constant_is_refused(tmp_path: Path):
    text = (FOLDER / "gb10.yaml").read_text()
    path = tmp_path / "x.yaml"
    path.write_text(text.replace("read_gb_s: 232.0", "read_gb_s: 0"))
    with pytest.raises(ValueError, match=r"x\.yaml: read_gb_s is 0"):
        read_device(path)
    path.write_text(text + "speed: 3\n")
    with pytest.raises(ValueError, match="unknown: speed"):
        read_device(path)


def test_what_a_box_has_measured_replaces_the_constants(tmp_path: Path):
    faster = dataclasses.replace(GB10, read_gb_s=240.5, source="measured")
    write(faster, tmp_path / file_name(GB10.kind))
    assert device("gb10", measured=tmp_path) == faster
    assert device("gb10", measured=tmp_path / "none").read_gb_s == 232.0
    with pytest.raises(ValueError, match="there are: gb10"):
        device("gb11", measured=tmp_path)
