"""Kimi delta attention: chunked equals recurrent, states after every token, fast decays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparkjax.kernels.kda import reference as kda

HEADS, DIM, VALUE, TOKENS = 3, 8, 5, 41


def inputs(seed=0, low=-5.0, rows=2):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    g = low * jax.nn.sigmoid(2 * normal(rows, TOKENS, HEADS, DIM))
    beta = jax.nn.sigmoid(normal(rows, TOKENS, HEADS))
    q, k = normal(rows, TOKENS, HEADS, DIM), normal(rows, TOKENS, HEADS, DIM)
    v = normal(rows, TOKENS, HEADS, VALUE)
    return q, k, v, g, beta, normal(rows, HEADS, DIM, VALUE)


def plain(q, k, v, g, beta, state):
    """The definition, token by token in float64; outputs and the state after every token."""
    q, k, v, g, beta, state = (np.asarray(x, np.float64) for x in (q, k, v, g, beta, state))
    unit = [x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k)]
    q, k = unit[0] * q.shape[-1] ** -0.5, unit[1]
    out, states = [], []
    for t in range(q.shape[1]):
        state = state * np.exp(g[:, t])[..., None]
        u = beta[:, t][..., None] * (v[:, t] - np.einsum("bhde,bhd->bhe", state, k[:, t]))
        state = state + k[:, t][..., None] * u[:, :, None]
        out.append(np.einsum("bhde,bhd->bhe", state, q[:, t]))
        states.append(state)
    return np.stack(out, 1), np.stack(states, 1)


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
@pytest.mark.parametrize("low", [-5.0, -60.0], ids=["release", "fast"])
def test_chunked_equals_the_definition(chunk, low):
    args = inputs(low=low)
    out, _, state = kda.chunked(*args, chunk=chunk)
    expected, states = plain(*args)
    np.testing.assert_allclose(out, expected, atol=2e-6)
    np.testing.assert_allclose(state, states[:, -1], atol=5e-6)


@pytest.mark.parametrize("count", [9, TOKENS], ids=["recurrent", "chunked"])
def test_recent_states_of_rows_of_different_lengths(count):
    q, k, v, g, beta, state = inputs(1, rows=3)
    args = tuple(x[:, :count] for x in (q, k, v, g, beta))
    lengths = np.array([count, 2, 0])
    # What stands behind a row's real tokens must not matter.
    spoilt = [x.at[1, 2:].set(jnp.nan).at[2].set(jnp.nan) for x in args[3:]]
    _, last, (states, index) = kda.kda(*args[:3], *spoilt, state, jnp.asarray(lengths), 4)
    for row, length in enumerate(lengths):
        one = [x[row : row + 1, :length] for x in args]
        expected = plain(*one, state[row : row + 1])[1][0] if length else None
        final = expected[-1] if length else state[row]
        np.testing.assert_allclose(last[row], final, atol=5e-6)
        wanted = list(range(max(length - 4, 0), length))
        assert sorted(i for i in np.asarray(index[row]) if i < count) == wanted
        for place, token in enumerate(np.asarray(index[row])):
            if token < count:
                np.testing.assert_allclose(states[row, place], expected[token], atol=5e-6)


def test_gradients_agree():
    args = inputs(2, rows=1)

    def total(function):
        return lambda *a: (function(*a)[0] ** 2).sum()

    chunked = jax.grad(total(kda.chunked), argnums=range(6))(*args)
    recurrent = jax.grad(total(kda.recurrent), argnums=range(6))(*args)
    for found, expected in zip(chunked, recurrent, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-4)


def test_a_padding_head_stays_zero():
    q, k, v, g, beta, state = inputs(3)
    zero = [jnp.zeros_like(x) for x in (q, k, v)]
    out, _, last = kda.chunked(*zero, g, beta, jnp.zeros_like(state))
    assert not np.asarray(out).any() and not np.asarray(last).any()
