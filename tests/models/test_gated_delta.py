"""The gated delta rule: chunks equal the loop, and the states that a roll-back returns to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparkjax.kernels.gated_delta import reference


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
    loop, chunks = reference.recurrent(*args), reference.chunked(*args, chunk=chunk)
    for a, b in zip(loop, chunks, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_chunks_have_the_gradient_of_the_loop():
    args = inputs(20)

    def total(form, *args):
        out, u, state = form(*args)
        return jnp.sum(out**2) + jnp.sum(jnp.sin(state))

    loop = jax.grad(total, argnums=tuple(range(1, 7)))(reference.recurrent, *args)
    chunks = jax.grad(total, argnums=tuple(range(1, 7)))(
        lambda *a: reference.chunked(*a, chunk=8), *args
    )
    for a, b in zip(loop, chunks, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("count", [5, 40])
@pytest.mark.parametrize("keep", [3, 7])
def test_the_last_states_are_those_of_shorter_rows(count, keep):
    q, k, v, g, beta, state = inputs(count)
    lengths = jnp.array([count, 2], jnp.int32)
    out, last, (states, index) = reference.gated_delta(q, k, v, g, beta, state, lengths, keep)
    assert sorted(i for i in np.asarray(index[0]) if i < count) == list(
        range(max(count - keep, 0), count)
    )
    assert sorted(i for i in np.asarray(index[1]) if i < count) == [0, 1]
    for row in range(2):
        for place, token in enumerate(np.asarray(index[row])):
            if token < count:
                n = int(token) + 1
                _, _, short = reference.recurrent(
                    *(x[row : row + 1, :n] for x in (q, k, v, g, beta)), state[row : row + 1]
                )
                np.testing.assert_allclose(states[row, place], short[0], atol=2e-5)
        n = int(lengths[row])
        alone, _, short = reference.recurrent(
            *(x[row : row + 1, :n] for x in (q, k, v, g, beta)), state[row : row + 1]
        )
        np.testing.assert_allclose(last[row], short[0], atol=2e-5)
        np.testing.assert_allclose(out[row, :n], alone[0], atol=2e-5)


def test_empty_heads_stay_zero():
    q, k, v, g, beta, state = (jnp.zeros_like(x) for x in inputs(20))
    for form in (reference.recurrent, reference.chunked):
        out, _, last = form(q, k, v, g - 0.7, beta + 0.5, state)
        assert not np.any(out) and not np.any(last)
