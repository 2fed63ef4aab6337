"""Prediction layers of glm4_moe and MiMo: in pieces, taken back, and over ranks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from driver import GOLDEN, difference, prompts

from sparkjax.mesh.context import Context
from sparkjax.model import Model
from sparkjax.models import cache as caches
from sparkjax.models.batch import Batch
from sparkjax.prediction import Predictor

CASES = [
    ("glm4_moe", 0),
    pytest.param("mimo_v2_flash", 0, marks=pytest.mark.slow),
    ("mimo_v2", 1),
]
PAGES, SIZE, BACK = 8, 16, 3
CLOSE = 1e-5


@functools.cache
def setting(family):
    """The model, its first prompt's tokens, the states that its prediction layers read."""
    model = Model.load(GOLDEN / family, context=Context())
    tokens = prompts(family)[0]
    found = model.forward(tokens)
    return model, tokens, Predictor(model, len(tokens)).reads(found)


@functools.cache
def whole(family, depth):
    """Logits [T - 1 - depth, V] of every row whose token is known, in one call."""
    model, tokens, hidden = setting(family)
    following = tokens[1 + depth :]
    return Predictor(model, len(tokens)).feed(following, hidden[: len(following)], depth=depth)[0]


@pytest.mark.parametrize(("family", "depth"), CASES)
def test_pieces_and_taken_back_rows(family, depth):
    """Steps of 4 rows of which any number is kept, over what an earlier sequence left behind."""
    model, tokens, hidden = setting(family)
    following = tokens[1 + depth :]
    declared = model.family.declare_draft_caches(model.config, 1)
    sizes = caches.Sizes(PAGES, SIZE, 2, BACK)
    cache = {
        name: jnp.full(s.shape, jnp.nan, s.dtype)
        for name, s in caches.shapes(declared, sizes, "float32").items()
    }

    @jax.jit
    def step(params, cache, batch, hidden):
        logits, _, cache = model.family.draft(
            params, cache, batch, hidden, model.config, model.context, depth
        )
        return logits, cache

    def feed(ids, states, start, cache, width):
        pad = width - len(ids)
        batch = Batch(
            tokens=jnp.asarray(np.pad(ids, (0, pad), constant_values=5))[None],
            start=jnp.array([start], jnp.int32),
            lengths=jnp.array([len(ids)], jnp.int32),
            pages=jnp.arange(PAGES, dtype=jnp.int32)[None, ::-1],
            slots=jnp.ones((1,), jnp.int32),
        )
        states = np.pad(states, ((0, pad), (0, 0)), constant_values=np.nan)[None]
        logits, cache = step(model.params, cache, batch, jnp.asarray(states))
        return np.asarray(logits[0, : len(ids)]), cache

    found, at = [], 0
    for count in (16, 9, 16):
        out, cache = feed(following[at : at + count], hidden[at : at + count], at, cache, 16)
        found.append(out)
        at += count
    for kept in (1, 4, 2, 3, 1, 1, 4):
        ids = following[at : at + BACK + 1].copy()
        ids[kept:] = (ids[kept:] + 7) % model.config.vocab
        out, cache = feed(ids, hidden[at : at + BACK + 1], at, cache, BACK + 1)
        found.append(out[:kept])
        at += kept
    out, cache = feed(following[at : at + 13], hidden[at : at + 13], at, cache, 16)
    found.append(out)
    assert difference(np.concatenate(found), whole(family, depth)[: at + 13]) < CLOSE


@pytest.mark.parametrize(("family", "depth"), CASES)
def test_ranks_agree(family, depth):
    _, tokens, hidden = setting(family)
    following = tokens[1 + depth :]
    model = Model.load(GOLDEN / family, dtype="float32", ranks=3)
    out, _ = Predictor(model, len(tokens)).feed(following, hidden[: len(following)], depth=depth)
    assert difference(out, whole(family, depth)) < CLOSE


def test_mimo_has_no_more_depths_than_layers():
    model, tokens, hidden = setting("mimo_v2")
    with pytest.raises(ValueError, match="2 prediction layers"):
        Predictor(model, len(tokens)).feed(tokens[3:], hidden[:-3], depth=2)
