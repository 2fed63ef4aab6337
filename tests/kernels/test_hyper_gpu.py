"""The kernel of hyper-connections against its reference, interpreted and on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparkjax.kernels.hyper import reference, triton

FORM = {"rounds": 20, "eps": 1e-6, "norm_eps": 1e-5}


def case(tokens, n, hidden, dtype):
    keys = jax.random.split(jax.random.key(0), 4)
    out = (2 + n) * n
    fn = jax.random.normal(keys[1], (2, out, n * hidden)) / np.sqrt(n * hidden)
    return (
        jax.random.normal(keys[0], (1, tokens, n, hidden), dtype),
        fn,
        jax.random.normal(keys[2], (2, out)),
        1 + jax.random.uniform(keys[3], (2, 3)),
    )


def compare(found, expected, atol):
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape and one.dtype == jnp.float32
        np.testing.assert_allclose(one, other, atol=atol, rtol=0)


@pytest.mark.parametrize("n, hidden", [(4, 96), pytest.param(2, 32, marks=pytest.mark.slow)])
def test_equals_the_reference_interpreted(n, hidden):
    # The last part of `fn`'s inputs is not full, nor is the tile of tokens.
    args = case(3, n, hidden, jnp.float32)
    found = triton.coefficients(*args, jnp.int32(1), **FORM, interpret=True)
    compare(found, reference.coefficients(*args, 1, **FORM), 2e-6)
    np.testing.assert_allclose(found[2].sum(-2), 1, atol=1e-5)


def test_what_it_cannot_take():
    x, fn, *_ = case(1, 4, 96, jnp.float32)
    assert triton.supports(x, fn) is None
    assert "power of two" in triton.supports(x[:, :, :3], fn)
    assert "multiple of 64" in triton.supports(x[..., :12], fn)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_equals_the_reference_on_a_gpu(dtype):
    x, *rest = case(70, 4, 4096, dtype)
    run = jax.jit(functools.partial(triton.coefficients, layer=1, **FORM))
    whole = run(x, *rest)
    compare(
        whole, jax.jit(functools.partial(reference.coefficients, layer=1, **FORM))(x, *rest), 1e-5
    )
    for some in (slice(0, 1), slice(3, 11), slice(5, 69)):
        for one, other in zip(run(x[:, some], *rest), whole, strict=True):
            np.testing.assert_array_equal(one, other[:, some])
