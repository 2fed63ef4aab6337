"""The delta rule's GPU kernel against the reference, interpreted on any device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparkjax.kernels.gated_delta import reference as gdn
from sparkjax.kernels.gated_delta import triton
from sparkjax.kernels.kda import reference as kda

LAYERS, SLOTS, DIM = 2, 5, 16
REFERENCES = {"gdn": gdn.gated_delta_cached, "kda": kda.kda_cached}


def inputs(kind, count, places=1, rows=3, keys=1, heads=2, low=-4.0, seed=0, dtype=jnp.float32):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    keys = heads if kind == "kda" else keys
    channels = (DIM,) if kind == "kda" else ()
    g = low * jax.nn.sigmoid(3 * normal(rows, count, heads, *channels).astype(jnp.float32))
    return (
        normal(rows, count, keys, DIM),
        normal(rows, count, keys, DIM),
        normal(rows, count, heads, DIM),
        g,
        jax.nn.sigmoid(normal(rows, count, heads)).astype(jnp.float32),
        normal(LAYERS, SLOTS, places, heads, DIM, DIM).astype(jnp.float32),
        jnp.int32(1),
        jnp.asarray(rng.permutation(SLOTS)[:rows], jnp.int32),
        jnp.asarray([0, 7, 30][:rows], jnp.int32),
        jnp.asarray([count, max(count - 3, 1), 0][:rows], jnp.int32),
    )


@functools.cache
def compiled(kind):
    return jax.jit(REFERENCES[kind]), jax.jit(functools.partial(triton.gated_delta, interpret=True))


def compare(kind, args, atol):
    lengths = np.asarray(args[-1])
    reference, kernel = compiled(kind)
    (out, plane), (found, kept) = reference(*args), kernel(*args)
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(found[row, :length], out[row, :length], atol=atol)
        assert not np.any(found[row, length:])
    np.testing.assert_allclose(kept, plane, atol=atol)


@pytest.mark.parametrize(
    "kind, count, places",
    [
        ("kda", 5, 4),
        ("gdn", 37, 4),
        *[
            pytest.param(kind, *shape, marks=pytest.mark.slow)
            for kind in ("gdn", "kda")
            for shape in ((1, 1), (1, 4), (5, 9), (37, 1), (48, 4))
        ],
    ],
)
def test_equals_the_reference(kind, count, places):
    compare(kind, inputs(kind, count, places), atol=2e-5)


def test_channels_that_decay_at_once():
    args = list(inputs("kda", 40, low=-400.0))
    args[3] = args[3].at[:, ::3].set(0.0)
    compare("kda", args, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_bits_depend_neither_on_rows_nor_on_tokens(kind):
    _, kernel = compiled(kind)
    args = inputs(kind, 4, 4, rows=2)
    out, plane = kernel(*args[:9], jnp.asarray([4, 4], jnp.int32))
    for row in range(2):
        kept = args[5]
        for t in range(4):
            one = [x[row : row + 1, t : t + 1] for x in args[:5]]
            where = args[7][row : row + 1], args[8][row : row + 1] + t
            found, kept = kernel(*one, kept, args[6], *where, jnp.ones(1, jnp.int32))
            np.testing.assert_array_equal(found[0, 0], out[row, t])
        slot = int(args[7][row])
        np.testing.assert_array_equal(kept[1, slot], plane[1, slot])
