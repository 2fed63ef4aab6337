"""Sums up to an edge: the GPU kernel beside the reference, and each row alone beside many."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparkjax.kernels.row_sums import reference, triton

ROWS, EDGES = 5, 16


def case(vocab, seed=0):
    rng = np.random.default_rng(seed)
    keys = rng.integers(0, 1 << 31, (ROWS, vocab), dtype=np.int64).astype(np.int32)
    keys[:, : vocab // 2] = keys[:, :1]  # many on one key
    weights = rng.random((ROWS, vocab), dtype=np.float32)
    edges = rng.integers(-1, 1 << 31, (ROWS, EDGES), dtype=np.int64).astype(np.int32)
    edges[:, 0], edges[:, 1], edges[:, 2] = -1, 0x7FFFFFFF, keys[:, 0]
    return keys, weights, edges


def exact(keys, weights, edges):
    chosen = keys[:, None, :] <= edges[:, :, None]
    return np.sum(np.where(chosen, weights[:, None, :], 0), axis=-1, dtype=np.float64)


@pytest.mark.parametrize("vocab", [67, 5000])
def test_sums_are_those_of_numpy(vocab):
    keys, weights, edges = case(vocab)
    for run in (reference.upto, lambda *a: triton.upto(*a, interpret=True)):
        counted = run(jnp.asarray(keys), None, jnp.asarray(edges))
        assert counted.dtype == jnp.int32
        np.testing.assert_array_equal(counted, exact(keys, np.ones_like(keys), edges))
        summed = run(jnp.asarray(keys), jnp.asarray(weights), jnp.asarray(edges))
        np.testing.assert_allclose(summed, exact(keys, weights, edges), rtol=2e-6)
        single = run(jnp.asarray(keys), jnp.asarray(weights), jnp.asarray(edges[:, 2:3]))
        np.testing.assert_array_equal(single, summed[:, 2:3])


@pytest.mark.parametrize("count", [1, 5])
def test_a_row_has_the_same_bits_in_any_company(count):
    keys, weights, edges = map(jnp.asarray, case(5000))
    every = triton.upto(keys, weights, edges, interpret=True)
    some = triton.upto(keys[:count], weights[:count], edges[:count], interpret=True)
    assert (every[:count] == some).all()


def test_a_number_of_edges_that_is_no_power_of_two_is_refused():
    keys, _, edges = case(10)
    assert "power of two" in triton.supports(keys, edges[:, :3])
    assert triton.supports(keys, edges) is None


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [49_152, 248_320])
def test_on_a_gpu(vocab):
    keys, weights, edges = case(vocab)
    counted = jax.jit(triton.upto, static_argnames="interpret")(keys, None, edges)
    np.testing.assert_array_equal(counted, exact(keys, np.ones_like(keys), edges))
    run = jax.jit(triton.upto)
    summed = run(keys, weights, edges)
    np.testing.assert_allclose(summed, exact(keys, weights, edges), rtol=2e-6)
    for row in range(ROWS):
        alone = run(keys[row : row + 1], weights[row : row + 1], edges[row : row + 1])
        assert (np.asarray(alone)[0] == np.asarray(summed)[row]).all()
