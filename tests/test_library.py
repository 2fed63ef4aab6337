"""The library: captured activations, gradients, scoring and generation of a small model."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparkjax.mesh.context import Context
from sparkjax.model import Model, one_row, pages_for
from sparkjax.models import cache as caches

GOLDEN = Path(__file__).parent / "golden"
TOKENS = np.arange(3, 43) * 7 % 384


@pytest.fixture(scope="module")
def model() -> Model:
    return Model.load(GOLDEN / "qwen3", dtype="float32")


def test_scores_are_the_log_softmax_of_the_logits(model: Model):
    logits = model.forward(TOKENS).logits.astype(np.float64)
    expected = jax.nn.log_softmax(jnp.asarray(logits))[np.arange(len(TOKENS) - 1), TOKENS[1:]]
    assert np.abs(model.score(TOKENS) - expected).max() < 1e-4
    assert np.abs(model.score(TOKENS, tile=16) - expected).max() < 1e-4


def test_captured_activations_add_up(model: Model):
    found = model.forward(TOKENS, capture=("embed", "mixer_out", "mlp_out", "residual"))
    total = found.captured["embed"] + (found.captured["mixer_out"] + found.captured["mlp_out"]).sum(0)
    assert np.abs(total - found.residual).max() < 1e-4
    assert np.array_equal(found.captured["residual"][-1], found.residual)


def test_generation_is_the_same_from_the_engine_and_step_by_step(model: Model):
    prompts = [TOKENS[:5].tolist(), TOKENS.tolist()]
    found = model.generate(prompts, max_tokens=8, stop_ids=())
    for prompt, generation in zip(prompts, found, strict=True):
        assert list(generation.tokens) == model.greedy(prompt, 8).tolist()
        assert generation.finish == "length"


def test_sampled_generation_repeats_with_its_seed(model: Model):
    first, again, other = (
        model.generate(TOKENS.tolist(), max_tokens=12, stop_ids=(), temperature=1.0, seed=seed).tokens
        for seed in (5, 5, 6)
    )
    assert first == again != other


def test_gradients_flow_through_the_reference_path(model: Model):
    context = Context(dtype="float32")
    pages = pages_for(len(TOKENS))
    sizes = caches.Sizes(pages, 64, 1)
    cache = caches.allocate(model.family.declare_caches(model.config, 1), sizes, "float32")
    batch = one_row(TOKENS.astype(np.int32), 0, pages, pad=len(TOKENS))

    @jax.jit
    def total(params):
        out = model.family.forward(params, cache, batch, model.config, context)
        logits = model.family.logits(params, out.residual, model.config, context)
        logp = jax.nn.log_softmax(logits[0, :-1])
        return jnp.take_along_axis(logp, TOKENS[1:, None], axis=-1).sum()

    params = jax.tree.map(lambda a: a.astype(jnp.float32), model.params)
    grads = jax.jit(jax.grad(total))(params)
    assert all(bool(jnp.isfinite(g).all()) for g in jax.tree.leaves(grads))
    # A directional derivative says whether they are the gradients.
    direction = jax.tree.map(lambda g: g / (jnp.linalg.norm(g) + 1e-9), grads)
    slope = sum(jnp.vdot(g, d) for g, d in zip(*map(jax.tree.leaves, (grads, direction)), strict=True))
    step = 1e-3
    ahead, behind = (
        total(jax.tree.map(lambda p, d, s=sign: p + s * step * d, params, direction))
        for sign in (1, -1)
    )
    assert abs((ahead - behind) / (2 * step) - slope) < 0.02 * abs(slope)


def test_one_token_cannot_be_scored(model: Model):
    with pytest.raises(ValueError, match="at least 2 tokens, got 1"):
        model.score([5])
