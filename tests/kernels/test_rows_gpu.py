"""On a GPU, a row's result has the same bits in any company, and decode those of verification."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparkjax.kernels.attention import triton as attention
from sparkjax.kernels.gated_delta import triton as delta
from sparkjax.kernels.indexer import triton as indexer
from sparkjax.kernels.sparse_attention import triton as sparse

pytestmark = pytest.mark.gpu
ROWS, TOKENS, TABLE, PAGE = 64, 4, 40, 64
LENGTH = TABLE * PAGE


def normal(seed, *shape, dtype=jnp.bfloat16):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


@pytest.fixture(scope="module")
def tables():
    """Shuffled page tables [ROWS, TABLE] and where rows begin (anywhere)."""
    rng = np.random.default_rng(0)
    pages = rng.permutation(ROWS * TABLE).reshape(ROWS, TABLE)
    start = rng.integers(0, LENGTH - TOKENS, ROWS)
    return jnp.asarray(pages, jnp.int32), jnp.asarray(start, jnp.int32)


def company(run, given, start):
    """`run(given, start)` over all rows, over some, and token by token, is one and the same.

    `given` are arrays [ROWS, TOKENS, ...]; what `run` returns has the same first dimensions.
    """
    whole = np.asarray(run(given, start, slice(None)).astype(jnp.float32))
    for rows in (slice(0, 1), slice(3, 5), slice(10, 43)):
        some = run([x[rows] for x in given], start[rows], rows)
        np.testing.assert_array_equal(np.asarray(some.astype(jnp.float32)), whole[rows])
    for t in range(TOKENS):
        one = run([x[:7, t : t + 1] for x in given], start[:7] + t, slice(0, 7))
        np.testing.assert_array_equal(np.asarray(one.astype(jnp.float32))[:, 0], whole[:7, t])


@pytest.mark.parametrize("heads, kv_heads, dim", [(32, 8, 128), (24, 4, 256)])
def test_attention(tables, heads, kv_heads, dim):
    pages, start = tables
    k, v = (normal(i, 1, ROWS * TABLE, PAGE, kv_heads, dim) for i in (1, 2))
    kernel = jax.jit(functools.partial(attention.paged_attention, scale=dim**-0.5))

    def run(given, start, rows):
        (q,) = given
        return kernel(q, k, v, 0, pages[rows], start, jnp.full(len(q), q.shape[1], jnp.int32))

    company(run, [normal(3, ROWS, TOKENS, heads, dim)], start)


def test_latent_attention(tables):
    pages, start = tables
    plane = normal(1, 1, ROWS * TABLE, PAGE, 576)
    kernel = jax.jit(functools.partial(sparse.latent_attention, scale=0.06, value_dim=512, layer=0))
    rng = np.random.default_rng(1)
    selected = np.sort(rng.integers(0, LENGTH, (ROWS, TOKENS, 1100)), -1)
    selected[rng.random(selected.shape) < 0.1] = -1

    def run(given, start, rows):
        q, selected = given
        return kernel(q, plane=plane, pages=pages[rows], selected=selected)

    company(run, [normal(3, ROWS, TOKENS, 16, 576), jnp.asarray(selected, jnp.int32)], start)


def test_scores(tables):
    pages, start = tables
    plane = normal(1, 1, ROWS * TABLE, PAGE, 128)
    kernel = jax.jit(functools.partial(indexer.scores, scale=0.1))

    def run(given, start, rows):
        q, weights = given
        limit = jnp.full(q.shape[:2], LENGTH, jnp.int32)
        return kernel(q, weights, plane, 0, pages[rows], limit)

    weights = normal(4, ROWS, TOKENS, 32, dtype=jnp.float32)
    company(run, [normal(3, ROWS, TOKENS, 32, 128), weights], start)


@pytest.mark.parametrize("channels", [(), (128,)], ids=["gdn", "kda"])
def test_states(channels):
    heads = 8
    plane = normal(5, 1, ROWS, TOKENS, heads, 128, 128, dtype=jnp.float32)
    g = -jax.nn.sigmoid(normal(6, ROWS, TOKENS, heads, *channels, dtype=jnp.float32))
    given = [
        *(normal(i, ROWS, TOKENS, heads, 128) for i in range(3)),
        g,
        -g.reshape(*g.shape[:3], -1)[..., 0],
    ]
    kernel = jax.jit(delta.gated_delta)
    slots, start = jnp.arange(ROWS, dtype=jnp.int32), jnp.arange(ROWS, dtype=jnp.int32) * 3

    def run(rows, tokens, plane):
        cut = [x[rows, tokens] for x in given]
        count = cut[0].shape[1]
        lengths = jnp.full(len(cut[0]), count, jnp.int32)
        return kernel(*cut, plane, 0, slots[rows], start[rows] + tokens.start, lengths)

    out, states = run(slice(None), slice(0, TOKENS), plane)
    some, kept = run(slice(3, 5), slice(0, TOKENS), plane)
    np.testing.assert_array_equal(some, out[3:5])
    np.testing.assert_array_equal(kept[:, 3:5], states[:, 3:5])
    kept = plane
    for t in range(TOKENS):
        one, kept = run(slice(0, 7), slice(t, t + 1), kept)
        np.testing.assert_array_equal(one[:, 0], out[:7, t])
    np.testing.assert_array_equal(kept[:, :7], states[:, :7])
