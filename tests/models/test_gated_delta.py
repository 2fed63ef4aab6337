"""The gated delta rule: chunks equal the loop, and the states that a roll-back returns to."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparkjax.kernels.gated_delta import reference

recurrent = jax.jit(reference.recurrent)
chunked = jax.jit(reference.chunked, static_argnames="chunk")
gated_delta = jax.jit(reference.gated_delta, static_argnames="keep")


def inputs(count, seed=0, batch=2, keys=2, values=4, dk=8, dv=6):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    # Decays from none to almost all, so that long sums meet short ones.
    g = -jnp.exp(2 * normal(batch, count, values))
    return (
        normal(batch, count, keys, dk),
        normal(batch, count, keys, dk),
        normal(batch, count, values, dv),
        g,
        jax.nn.sigmoid(normal(batch, count, values)),
        normal(batch, values, dk, dv),
    )


@pytest.mark.parametrize("count", [1, 7, 64, 65, 130])
@pytest.mark.parametrize("chunk", [4, 64])
def test_chunks_equal_the_loop(count, chunk):
    args = inputs(count)
    loop, chunks = recurrent(*args), chunked(*args, chunk=chunk)
    for a, b in zip(loop, chunks, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_chunks_have_the_gradient_of_the_loop():
    args = inputs(20)

    def total(form, *args):
        out, _, state = form(*args)
        return jnp.sum(out**2) + jnp.sum(jnp.sin(state))

    def gradient(form):
        return jax.jit(jax.grad(functools.partial(total, form), argnums=tuple(range(6))))(*args)

    loop = gradient(reference.recurrent)
    chunks = gradient(functools.partial(reference.chunked, chunk=8))
    for a, b in zip(loop, chunks, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("count", [5, 40])
@pytest.mark.parametrize("keep", [3, 7])
def test_the_last_states_are_those_of_shorter_rows(count, keep):
    q, k, v, g, beta, state = inputs(count)
    lengths = jnp.array([count, 2], jnp.int32)
    out, last, (states, index) = gated_delta(q, k, v, g, beta, state, lengths, keep=keep)
    assert sorted(i for i in np.asarray(index[0]) if i < count) == list(
        range(max(count - keep, 0), count)
    )
    assert sorted(i for i in np.asarray(index[1]) if i < count) == [0, 1]
    # A row that ends at token n leaves the state that the longer row had there.
    for n in range(1, count + 1):
        ended = jnp.where(jnp.arange(count) < n, 1.0, 0.0)[None, :, None]
        alone, _, short = recurrent(q, k, v, g * ended, beta * ended, state)
        for row in range(2):
            for place in np.flatnonzero(np.asarray(index[row]) == n - 1):
                np.testing.assert_allclose(states[row, place], short[row], atol=2e-5)
            if n == lengths[row]:
                np.testing.assert_allclose(last[row], short[row], atol=2e-5)
                np.testing.assert_allclose(out[row, :n], alone[row, :n], atol=2e-5)


def test_empty_heads_stay_zero():
    q, k, v, g, beta, state = (jnp.zeros_like(x) for x in inputs(20))
    for form in (reference.recurrent, reference.chunked):
        out, _, last = form(q, k, v, g - 0.7, beta + 0.5, state)
        assert not np.any(out) and not np.any(last)
