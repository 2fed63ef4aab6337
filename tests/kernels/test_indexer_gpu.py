"""The indexer's, the candidates' and the convolution's GPU kernels against the references,
interpreted on any device."""

import jax.numpy as jnp
import numpy as np
import pytest

from sparkjax.kernels.candidates import reference as coarse
from sparkjax.kernels.candidates import triton as coarse_triton
from sparkjax.kernels.indexer import reference, triton
from sparkjax.kernels.short_conv import reference as conv
from sparkjax.kernels.short_conv import triton as conv_triton


@pytest.fixture(autouse=True)
def short_runs(monkeypatch):
    monkeypatch.setattr(triton, "RUN", 16)
    monkeypatch.setattr(triton, "KEYS", 16)
    monkeypatch.setattr(triton, "FEW", 0)


def case(seed=0, heads=2, dim=16):
    """Two sequences of 40 rows in pages of 8, three queries each, and how many rows these see."""
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(2, 3, heads, dim))
    weights = rng.normal(size=(2, 3, heads))
    plane = rng.normal(size=(2, 12, 8, dim))
    pages = rng.permutation(12)[:10].reshape(2, 5).astype(np.int32)
    limit = np.int32([[0, 5, 40], [17, 30, 33]])
    floats = (jnp.asarray(x, jnp.float32) for x in (q, weights, plane))
    return (*floats, 1, jnp.asarray(pages), jnp.asarray(limit))


def test_chooses_the_best_rows():
    args = case()
    expected = reference.select(*args, k=9, scale=0.3)
    found = triton.select(*args, k=9, scale=0.3, interpret=True)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("k", [6, pytest.param(31, marks=pytest.mark.slow)])
def test_ties_go_to_the_lower_index(k):
    rng = np.random.default_rng(1)
    scores = rng.choice([-2.5, -1e-30, -0.0, 0.0, 3.0, 3.0000002, 1e30, -np.inf], size=(1, 3, 31))
    scores = jnp.asarray(scores, jnp.float32)
    limit = jnp.int32([[0, 20, 31]])
    seen = jnp.arange(31) < limit[..., None]
    expected = reference.top_rows(scores, seen, k)
    np.testing.assert_array_equal(triton.top_rows(scores, limit, k, interpret=True), expected)


@pytest.mark.slow
def test_blocks_and_a_choice_inside_them():
    args = case(2)
    settings = {"size": 3, "scale": 0.4}
    blocks = coarse.pick_blocks(*args, k=5, **settings)
    found = coarse_triton.pick_blocks(*args, k=5, **settings, interpret=True)
    np.testing.assert_array_equal(found, blocks)
    for k in (4, 20):
        expected = coarse.select_within(*args, blocks, k=k, **settings)
        inside = coarse_triton.select_within(*args, blocks, k=k, **settings, interpret=True)
        np.testing.assert_array_equal(inside, expected)


@pytest.mark.parametrize("count", [5, pytest.param(21, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dilation, activation", [(1, "silu"), (3, "none")])
def test_convolutions(count, dilation, activation):
    rng = np.random.default_rng(3)
    x, tail, weight = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((2, count, 40), (2, 3 * dilation, 40), (40, 4))
    )
    settings = {"dilation": dilation, "activation": activation}
    expected = conv.short_conv(x, tail, weight, **settings)
    found = conv_triton.short_conv(x, tail, weight, **settings, interpret=True)
    np.testing.assert_allclose(found, expected, atol=1e-6)
