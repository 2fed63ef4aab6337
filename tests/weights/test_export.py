"""Export to Orbax: bit for bit, trained with optax, and back into service."""

from __future__ import annotations

import builtins
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from test_quantized_load import encoded
from typer.testing import CliRunner

import sparkjax
from sparkjax import model as models
from sparkjax.cli.app import app
from sparkjax.export import export
from sparkjax.mesh.context import Context
from sparkjax.model import Model, one_row, pages_for
from sparkjax.models import cache as caches
from sparkjax.models import params as declarations
from sparkjax.weights import exported, formats, load
from sparkjax.weights.checkpoint import open_checkpoint
from sparkjax.weights.errors import CheckpointError

GOLDEN = Path(__file__).parents[1] / "golden"
TOKENS = np.arange(3, 19) * 7 % 384


def leaves(params) -> list[tuple[str, object]]:
    return declarations.leaves_of(params)


def as_loaded(path: Path, ranks: int = 1, rank: int | None = None):
    """The parameters as they are, never expanded."""
    checkpoint = open_checkpoint(path)
    family = models.family_of(checkpoint.config)
    config = family.read_config(checkpoint.config)
    drafts, partial = models._drafts(family, config, ranks, checkpoint)
    tree = family.declare(config, ranks) | ({"draft": drafts} if drafts else {})
    ignored = (*models.ignored(family, config), *partial)
    return load.load_params(tree, checkpoint, ranks=ranks, rank=rank, ignored=ignored)


def same(a, b) -> None:
    assert [n for n, _ in leaves(a)] == [n for n, _ in leaves(b)]
    for (name, x), (_, y) in zip(leaves(a), leaves(b), strict=True):
        assert jax.tree.structure(x) == jax.tree.structure(y), name
        for p, q in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True):
            assert p.dtype == q.dtype and np.asarray(p).tobytes() == np.asarray(q).tobytes(), name


@pytest.mark.parametrize("kind", ["fp8", "int4", "nvfp4", "mxfp4"])
def test_quantized_weights_come_back_bit_for_bit(tmp_path, kind):
    path = encoded(tmp_path / "packed", "llama", kind)
    out = export(path, tmp_path / "out")
    before, after = as_loaded(path), as_loaded(out)
    assert any(formats.is_quantized(leaf) for _, leaf in leaves(after))
    same(before, after)
    for rank in range(2):
        same(as_loaded(path, 2, rank), as_loaded(out, 2, rank))


@pytest.mark.parametrize("family", ["qwen3_5_moe", "glm_moe_dsa"])
def test_experts_and_mixed_stacks_come_back(tmp_path, family):
    path = encoded(tmp_path / "packed", family, "nvfp4")
    same(as_loaded(path), as_loaded(export(path, tmp_path / "out")))


def test_a_model_is_trained_with_optax_and_served_again(tmp_path):
    """Export, plain Orbax, a step of optax, plain Orbax, load."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "in").mkdir(exist_ok=True)
        shutil.copy(GOLDEN / "qwen3" / name, tmp_path / "in" / name)
    (tmp_path / "in" / "generation_config.json").write_text("{}")
    out = export(tmp_path / "in", tmp_path / "out", dtype="float32")
    assert (out / "generation_config.json").exists() and not (out / "model.safetensors").exists()
    plain = Model.load(GOLDEN / "qwen3", dtype="float32")
    model = sparkjax.load(str(out), dtype="float32")
    first = model.forward(TOKENS).logits
    np.testing.assert_array_equal(first, plain.forward(TOKENS).logits)

    with ocp.StandardCheckpointer() as checkpointer:
        params = checkpointer.restore(out / "params")
    assert jax.tree.structure(params) == jax.tree.structure(model.params)
    context = Context(dtype="float32")
    sizes = caches.Sizes(pages_for(len(TOKENS)), 64, 1)
    cache = caches.allocate(model.family.declare_caches(model.config, 1), sizes, "float32")
    batch = one_row(TOKENS.astype(np.int32), 0, sizes.pages, pad=len(TOKENS))

    def loss(params):
        found = model.family.forward(params, cache, batch, model.config, context)
        logits = model.family.logits(params, found.residual, model.config, context)[0]
        wrong = optax.softmax_cross_entropy_with_integer_labels(logits[:-1], TOKENS[1:])
        return wrong.mean(), logits

    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    optimiser = optax.sgd(0.5)

    (value, _), gradient = step(params)
    updates, _ = optimiser.update(gradient, optimiser.init(params))
    trained = optax.apply_updates(params, updates)
    (better, expected), _ = step(trained)
    assert better < value
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(out / "params", trained, force=True)

    again = sparkjax.load(str(out), dtype="float32")
    logits = again.forward(TOKENS).logits
    assert np.abs(logits - first).max() > 1e-3
    np.testing.assert_allclose(logits, expected, atol=1e-4)


@pytest.mark.slow
def test_an_exported_model_generates(tmp_path):
    path = encoded(tmp_path / "packed", "qwen3", "fp8")
    out = export(path, tmp_path / "out")
    found, expected = (
        Model.load(p, dtype="float32").generate(TOKENS.tolist(), max_tokens=8, stop_ids=())
        for p in (out, path)
    )
    assert found.tokens == expected.tokens


def test_dequantized_weights_are_the_numbers(tmp_path):
    path = encoded(tmp_path / "packed", "qwen3", "mxfp4")
    out = export(path, tmp_path / "out", dtype="bfloat16")
    packed, plain = (dict(leaves(as_loaded(p))) for p in (path, out))
    assert not any(map(formats.is_quantized, plain.values()))
    numbers = jax.jit(formats.dequantize, static_argnames="dtype")
    name = "layers.mlp.down"
    assert formats.is_quantized(packed[name])
    np.testing.assert_array_equal(plain[name], numbers(packed[name], dtype=jnp.bfloat16))
    assert "quantization_config" not in open_checkpoint(out).config


def test_large_arrays_are_cut_on_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(exported, "CHUNK", 1 << 14)
    out = export(GOLDEN / "qwen3", tmp_path / "out")
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.metadata(out / "params")
    found = getattr(found, "item_metadata", found)
    embed = getattr(found, "tree", found)["embed"]
    assert np.prod(embed.storage.chunk_shape) * 2 <= 1 << 14 < np.prod(embed.shape) * 2


# --- What is refused -----------------------------------------------------------------------------


def test_bad_calls(tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(CheckpointError, match="there exists already"):
        export(GOLDEN / "llama", tmp_path / "there")
    with pytest.raises(
        CheckpointError, match="dtype is 'int8'; allowed: float32, bfloat16, or none"
    ):
        export(GOLDEN / "llama", tmp_path / "x", dtype="int8")
    with pytest.raises(CheckpointError, match="lookup tables"):
        export(GOLDEN / "qwen4_exp", tmp_path / "x")


def test_without_orbax_it_says_what_to_install(tmp_path, monkeypatch):
    real = builtins.__import__

    def missing(name, *rest):
        if name.startswith("orbax"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(CheckpointError, match=r"pip install 'sparkjax\[orbax\]'"):
        export(GOLDEN / "llama", tmp_path / "out")


def test_broken_exports_are_told(tmp_path):
    out = export(GOLDEN / "llama", tmp_path / "out")
    facts = json.loads((out / exported.FACTS).read_text())

    def told(change) -> str:
        changed = json.loads(json.dumps(facts))
        change(changed)
        (out / exported.FACTS).write_text(json.dumps(changed))
        with pytest.raises(CheckpointError) as caught:
            Model.load(out, dtype="float32")
        return str(caught.value)

    assert "layout is 9; allowed: 1" in told(lambda f: f.update(layout=9))
    assert "unexpected parameter what" in told(lambda f: f["params"].update(what="array"))
    assert "missing tensor" in told(lambda f: f["params"].pop("embed"))
    odd = {"format": "Path", "static": {}, "planes": {}}
    assert "format is 'Path'" in told(lambda f: f["params"].update(embed=odd))
    (out / exported.FACTS).write_text(json.dumps(facts))
    shutil.rmtree(out / exported.PARAMS)
    with pytest.raises(CheckpointError, match="cannot be read"):
        Model.load(out, dtype="float32")


def test_the_verb(tmp_path):
    target = tmp_path / "out"
    done = CliRunner().invoke(app, ["export", str(target), "-m", str(GOLDEN / "llama")])
    assert done.exit_code == 0, done.output
    assert done.stdout.strip() == str(target)
    again = CliRunner().invoke(app, ["export", str(target), "-m", str(GOLDEN / "llama")])
    assert again.exit_code == 1 and "exists already" in again.output
