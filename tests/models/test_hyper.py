"""Hyper-connections against their formula, written out; two-pass and single-pass use."""

import jax.numpy as jnp
import numpy as np
import pytest

from sparkjax.mesh.context import Context
from sparkjax.models.layers import hyper
from sparkjax.models.layers.hyper import Hyper

HIDDEN, TOKENS = 12, 9


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def formula(streams, fn, base, scale, h):
    """(pre, post, C) of one token, float64."""
    n = h.streams
    flat = streams.reshape(-1)
    m = fn @ (flat / np.sqrt((flat * flat).mean() + h.norm_eps))
    pre = sigmoid(m[:n] * scale[0] + base[:n]) + h.eps
    post = 2 * sigmoid(m[n : 2 * n] * scale[1] + base[n : 2 * n])
    c = np.exp((m[2 * n :] * scale[2] + base[2 * n :]).reshape(n, n))
    c = c / c.sum(1, keepdims=True) + h.eps
    c = c / (c.sum(0) + h.eps)
    for _ in range(h.rounds - 1):
        c = c / (c.sum(1, keepdims=True) + h.eps)
        c = c / (c.sum(0) + h.eps)
    return pre, post, c


def made(n, rounds, seed=0):
    rng = np.random.default_rng(seed)
    h = Hyper(n, rounds, 1e-6, 1e-5)
    out = (2 + n) * n
    fn, base = rng.normal(size=(2, out, n * HIDDEN)), rng.normal(size=(2, out))
    p = {"fn": fn / 5, "base": base, "scale": rng.normal(size=(2, 3))}
    streams = rng.normal(size=(1, TOKENS, n, HIDDEN))
    return h, {k: jnp.asarray(v, jnp.float32) for k, v in p.items()}, p, streams, rng


@pytest.mark.parametrize(("n", "rounds"), [(4, 20), (2, 1), (3, 5)])
def test_a_site_follows_the_formula(n, rounds):
    h, params, p, streams, rng = made(n, rounds)
    y = rng.normal(size=(1, TOKENS, HIDDEN))
    x = jnp.asarray(streams, jnp.float32)
    s = hyper.site(x, params, 1, h, Context())
    inside = hyper.collapse(s.pre, x)
    after = hyper.expand(s, jnp.asarray(y, jnp.float32), x)
    for t in range(TOKENS):
        pre, post, c = formula(streams[0, t], p["fn"][1], p["base"][1], p["scale"][1], h)
        np.testing.assert_allclose(inside[0, t], pre @ streams[0, t], atol=1e-5)
        # The first index of C is the stream that is read.
        expected = post[:, None] * y[0, t] + np.einsum("ij,ih->jh", c, streams[0, t])
        np.testing.assert_allclose(after[0, t], expected, atol=1e-5)
    if rounds == 20:
        np.testing.assert_allclose(s.mix.sum(-2), 1, atol=1e-4)
        np.testing.assert_allclose(s.mix.sum(-1), 1, atol=1e-3)


def test_a_collapse_may_use_the_weights_of_another_site():
    h, params, p, streams, _ = made(4, 3, seed=1)
    x = jnp.asarray(streams, jnp.float32)
    first = hyper.site(x, params, 0, h, Context())
    second = hyper.site(x, params, 1, h, Context())
    assert np.abs(np.asarray(first.pre - second.pre)).max() > 0.01
    pre = formula(streams[0, 2], p["fn"][0], p["base"][0], p["scale"][0], h)[0]
    np.testing.assert_allclose(hyper.collapse(first.pre, x)[0, 2], pre @ streams[0, 2], atol=1e-5)
    one_hot = jnp.zeros((1, TOKENS, 4)).at[..., 0].set(1)
    np.testing.assert_array_equal(hyper.collapse(one_hot, x), x[:, :, 0])


def test_a_learned_head():
    h, _, _, streams, rng = made(3, 2)
    p = {
        "fn": rng.normal(size=(3, 3 * HIDDEN)),
        "base": rng.normal(size=3),
        "scale": rng.normal(size=1),
    }
    found = hyper.head_weights(
        jnp.asarray(streams, jnp.float32), {k: jnp.asarray(v, jnp.float32) for k, v in p.items()}, h
    )
    for t in range(TOKENS):
        flat = streams[0, t].reshape(-1)
        m = p["fn"] @ (flat / np.sqrt((flat * flat).mean() + h.norm_eps))
        expected = sigmoid(m * p["scale"] + p["base"]) + h.eps
        np.testing.assert_allclose(found[0, t], expected, atol=1e-5)
