"""On a GPU, operations take their kernels; shapes that these cannot take go to the reference."""

import functools

import jax
import jax.numpy as jnp
import pytest

from sparkjax.kernels import attention
from sparkjax.kernels.dispatch import KernelUnavailable
from sparkjax.mesh.context import Context

GPU = Context("bfloat16", platform="cuda")


def program(context, dim):
    def of(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    run = functools.partial(attention.paged_attention, context=context, scale=1.0)
    plane, ints = of(1, 4, 16, 2, dim), of(2, dtype=jnp.int32)
    pages = of(2, 2, dtype=jnp.int32)
    return str(jax.make_jaxpr(run)(of(2, 1, 4, dim), plane, plane, 0, pages, ints, ints))


def test_a_gpu_takes_the_kernel():
    assert "pallas_call" in program(GPU, 64)


def test_what_the_kernel_cannot_take_goes_to_the_reference():
    assert "pallas_call" not in program(GPU, 24)
    named = Context("bfloat16", platform="cuda", kernels=(("attention", "triton"),))
    with pytest.raises(KernelUnavailable, match="multiples of 16"):
        program(named, 24)


def test_no_platform_takes_references_only():
    assert "pallas_call" not in program(Context("bfloat16"), 64)
