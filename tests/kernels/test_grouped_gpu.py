"""Projections side by side: the kernel against its reference, interpreted and on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import packed_weights as weights
import pytest

from sparkjax.kernels.grouped_linear import reference, triton

GROUPS = 4


def case(kind, rows, n, k):
    x = weights.rows(rows * GROUPS, k).reshape(rows, GROUPS, k)
    return x, weights.weight(kind, (2,), GROUPS * n, k)


def exact(x, w):
    return jax.jit(reference.grouped)(x.astype(jnp.float32), w, 1)


@pytest.mark.parametrize("kind", ["fp8 block", pytest.param("nvfp4", marks=pytest.mark.slow)])
def test_equals_the_reference_interpreted(kind):
    x, w = case(kind, 3, 64, 256)
    y = jax.jit(lambda x, w: triton.grouped(x, w, jnp.int32(1), interpret=True))(x, w)
    assert y.shape == (3, GROUPS, 64)
    assert weights.relative(y, exact(x, w)) < 2e-3


def test_what_it_cannot_take():
    x, w = case("bf16", 3, 64, 256)
    assert triton.supports(x, w) is None
    assert "up to 64 are supported" in triton.supports(jnp.tile(x, (30, 1, 1)), w)
    assert "multiples of 32" in triton.supports(x, w[:, :200])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bf16", "fp8 block", "nvfp4", "int4"])
def test_equals_the_reference_on_a_gpu(kind):
    x, w = case(kind, 64, 256, 1024)
    run = jax.jit(lambda x, w: triton.grouped(x, w, 1))
    whole = run(x, w)
    assert weights.relative(whole, exact(x, w)) < 2e-3
    for rows in (1, 7, 33):
        np.testing.assert_array_equal(run(x[:rows], w), whole[:rows])
