"""The short convolution: against a plain convolution, in pieces, after a roll-back."""

import jax.numpy as jnp
import numpy as np
import pytest

from sparkjax.mesh.context import Context
from sparkjax.models import cache as caches
from sparkjax.models.batch import Batch
from sparkjax.models.layers.short_conv import declare_tail, short_conv
from sparkjax.models.params import Dim

CHANNELS, WIDTH, TOKENS = 6, 4, 23


def plain(x, taps, dilation):
    out = np.zeros_like(x)
    for t in range(len(x)):
        for j in range(WIDTH):
            source = t - (WIDTH - 1 - j) * dilation
            if source >= 0:
                out[t] += taps[:, j] * x[source]
    return out / (1 + np.exp(-out))


def feed(x, taps, cache, start, dilation, slot=0):
    batch = Batch(
        tokens=jnp.zeros((1, len(x)), jnp.int32),
        start=jnp.array([start], jnp.int32),
        lengths=jnp.array([len(x)], jnp.int32),
        pages=jnp.zeros((1, 1), jnp.int32),
        slots=jnp.array([slot], jnp.int32),
    )
    y, cache = short_conv(
        jnp.asarray(x)[None], jnp.asarray(taps)[None, :, None], 0, cache, "tail", 0, batch,
        Context(), dilation=dilation,
    )  # fmt: skip
    return np.asarray(y[0]), cache


@pytest.mark.parametrize(
    ("dilation", "pieces"), [(1, (1,) * 23), (1, (7, 2, 14)), (3, (11, 1, 1, 10)), (3, (23,))]
)
def test_pieces_equal_a_plain_convolution(dilation, pieces):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(TOKENS, CHANNELS)).astype(np.float32)
    taps = rng.normal(size=(CHANNELS, WIDTH)).astype(np.float32)
    declared = {"tail": declare_tail(Dim(CHANNELS), WIDTH, (0,), dilation)}
    cache = caches.allocate(declared, caches.Sizes(1, 64, slots=2, depth=2), "float32")
    # What an earlier sequence left in the slot must not be seen.
    cache = {"tail": cache["tail"] + 7}
    found, start = [], 0
    for count in pieces:
        y, cache = feed(x[start : start + count], taps, cache, start, dilation, slot=1)
        found.append(y)
        start += count
    np.testing.assert_allclose(np.concatenate(found), plain(x, taps, dilation), atol=1e-5)


def test_roll_back_forgets_what_was_taken_back():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(TOKENS, CHANNELS)).astype(np.float32)
    taps = rng.normal(size=(CHANNELS, WIDTH)).astype(np.float32)
    declared = {"tail": declare_tail(Dim(CHANNELS), WIDTH, (0,), 3)}
    cache = caches.allocate(declared, caches.Sizes(1, 64, slots=1, depth=3), "float32")
    _, cache = feed(x[:10], taps, cache, 0, 3)
    wrong = rng.normal(size=(4, CHANNELS)).astype(np.float32)
    wrong[0] = x[10]
    _, cache = feed(wrong, taps, cache, 10, 3)
    y, _ = feed(x[11:], taps, cache, 11, 3)
    np.testing.assert_allclose(y, plain(x, taps, 3)[11:], atol=1e-5)
