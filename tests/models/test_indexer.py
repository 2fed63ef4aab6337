"""Sparse selection: ties, near ties judged by the true scores, pools cut anywhere; attention over
a selection equals attention over all rows with the others masked."""

import jax.numpy as jnp
import numpy as np
import pytest

from sparkjax.kernels import blocks
from sparkjax.kernels.indexer import index_scores, select, top_rows
from sparkjax.kernels.sparse_attention import latent_attention
from sparkjax.mesh.context import Context
from sparkjax.models import cache as caches
from sparkjax.models.batch import Batch
from sparkjax.models.layers.pools import completed, declare_open, pool_tokens, weighted

CONTEXT = Context()


def test_a_tie_goes_to_the_lower_index_and_zero_has_one_sign():
    scores = jnp.array([[0.0, -0.0, 2.0, 0.0, -1.0, 2.0, -0.0, 5.0]])
    seen = jnp.array([[True] * 7 + [False]])
    assert top_rows(scores, seen, 3).tolist() == [[0, 2, 5]]
    assert top_rows(scores, seen, 5).tolist() == [[0, 1, 2, 3, 5]]
    assert top_rows(scores, seen, 8).tolist() == [[0, 1, 2, 3, 4, 5, 6, -1]]
    assert top_rows(scores, jnp.zeros_like(seen), 2).tolist() == [[-1, -1]]


def paged(rows, size, seed=0):
    """(plane [2, P, S, D], pages) holding rows [B, N, D] in shuffled pages of layer 1."""
    b, n, dim = rows.shape
    count = n // size
    pages = np.random.default_rng(seed).permutation(b * count).reshape(b, count)
    plane = np.full((2, b * count, size, dim), np.nan, np.float32)
    plane[1, pages.reshape(-1)] = rows.reshape(b * count, size, dim)
    return jnp.asarray(plane), jnp.asarray(pages, jnp.int32)


@pytest.mark.parametrize("budget", [1 << 24, 2000], ids=["whole", "few queries at a time"])
def test_selection_is_that_of_the_true_scores(monkeypatch, budget):
    monkeypatch.setattr(blocks, "BUDGET", budget)
    rng = np.random.default_rng(1)
    b, queries, heads, dim, n, k = 2, 13, 3, 8, 48, 6
    q, w = rng.normal(size=(b, queries, heads, dim)), rng.normal(size=(b, queries, heads))
    keys = rng.normal(size=(b, n, dim))
    # Many exact zeros: ties at the boundary are the rule here.
    w[0] = -np.abs(w[0])
    limit = rng.integers(0, n + 1, (b, queries))
    plane, pages = paged(keys.astype(np.float32), 8)
    chosen = select(
        jnp.asarray(q, jnp.float32), jnp.asarray(w, jnp.float32), plane, 1, pages,
        jnp.asarray(limit, jnp.int32), context=CONTEXT, k=k, scale=dim**-0.5,
    )  # fmt: skip
    products = np.einsum("bqhd,bnd->bqhn", q, keys) * dim**-0.5
    true = np.einsum("bqh,bqhn->bqn", w, np.maximum(products, 0))
    noise = 1e-5
    for row in range(b):
        for query in range(queries):
            found = [i for i in np.asarray(chosen[row, query]) if i >= 0]
            assert found == sorted(set(found)) and len(found) == min(k, limit[row, query])
            scores = true[row, query, : limit[row, query]]
            expected = np.sort(np.lexsort((np.arange(len(scores)), -scores))[:k])
            for extra, missed in zip(
                sorted(set(found) - set(expected)), sorted(set(expected) - set(found)), strict=True
            ):
                assert abs(scores[extra] - scores[missed]) < noise
                assert scores[missed] != scores[extra], "an exact tie went to the higher index"


def test_scores_have_the_published_formula():
    rng = np.random.default_rng(2)
    q, keys, w = rng.normal(size=(1, 3, 2, 4)), rng.normal(size=(1, 5, 4)), rng.normal(size=(1, 3, 2))
    found = index_scores(*(jnp.asarray(x, jnp.float32) for x in (q, keys, w)), 0.5)
    for i in range(3):
        for j in range(5):
            expected = sum(w[0, i, h] * max(0, 0.5 * q[0, i, h] @ keys[0, j]) for h in range(2))
            assert abs(found[0, i, j] - expected) < 1e-5


@pytest.mark.parametrize("budget", [1 << 24, 3000], ids=["whole", "few queries at a time"])
def test_attention_over_a_selection_is_masked_attention(monkeypatch, budget):
    monkeypatch.setattr(blocks, "BUDGET", budget)
    rng = np.random.default_rng(3)
    b, queries, heads, dim, value, near, n, k = 2, 9, 3, 8, 5, 7, 32, 6
    q = rng.normal(size=(b, queries, heads, dim))
    rows, entries = rng.normal(size=(b, near, dim)), rng.normal(size=(b, n, dim))
    seen = rng.random((b, queries, near)) < 0.6
    chosen = np.stack([[rng.permutation(n)[:k] for _ in range(queries)] for _ in range(b)])
    chosen[:, :, 4:] = np.where(rng.random((b, queries, 2)) < 0.5, -1, chosen[:, :, 4:])
    seen[0, 0], chosen[0, 0] = False, -1
    sinks = rng.normal(size=heads)
    plane, pages = paged(entries.astype(np.float32), 8)
    for sink in (None, sinks):
        found = latent_attention(
            jnp.asarray(q, jnp.float32), context=CONTEXT, scale=0.3, value_dim=value,
            rows=jnp.asarray(rows, jnp.float32), seen=jnp.asarray(seen), plane=plane, layer=1,
            pages=pages, selected=jnp.asarray(chosen, jnp.int32),
            sinks=None if sink is None else jnp.asarray(sink, jnp.float32),
        )  # fmt: skip
        keys = np.concatenate([rows, entries], 1)
        picked = np.zeros((b, queries, n), bool)
        for row, query, place in np.ndindex(chosen.shape):
            if chosen[row, query, place] >= 0:
                picked[row, query, chosen[row, query, place]] = True
        mask = np.concatenate([seen, picked], -1)[:, :, None]
        logits = np.where(mask, np.einsum("bqhd,bkd->bqhk", q, keys) * 0.3, -np.inf)
        weights = np.exp(logits)
        total = weights.sum(-1, keepdims=True)
        total = total + (0 if sink is None else np.exp(sink)[:, None])
        p = weights / np.where(total == 0, 1, total)
        expected = np.einsum("bqhk,bkd->bqhd", p, keys[..., :value])
        np.testing.assert_allclose(found, expected, atol=1e-5)


def batch(start, count, length=None):
    return Batch(
        tokens=jnp.zeros((1, count), jnp.int32),
        start=jnp.array([start], jnp.int32),
        lengths=jnp.array([count if length is None else length], jnp.int32),
        pages=jnp.zeros((1, 1), jnp.int32),
        slots=jnp.zeros((1,), jnp.int32),
    )


@pytest.mark.parametrize(("size", "earlier"), [(2, 0), (4, 4), (7, 0), (7, 4)])
@pytest.mark.parametrize("cuts", [(1,) * 29, (7, 2, 14, 6)])
def test_pools_do_not_depend_on_where_tiles_cut_them(size, earlier, cuts):
    rng = np.random.default_rng(4)
    x = rng.normal(size=(29, 3)).astype(np.float32)
    declared = {"open": declare_open(3, size, (0,), earlier)}
    ring = caches.allocate(declared, caches.Sizes(1, 64, slots=1, depth=2), "float32")["open"] + 9
    pools, start = {}, 0
    for count in cuts:
        # One token more than is real: it must not be kept.
        padded = np.concatenate([x[start : start + count], np.full((1, 3), 1e6, np.float32)])
        b = batch(start, count + 1, count)
        tokens, ring = pool_tokens(jnp.asarray(padded)[None], ring, 0, b, size, earlier)
        first, number = completed(b, size)
        for j in range(int(number[0])):
            pools[int(first[0]) + j] = np.asarray(tokens[0, j])
        start += count
    assert sorted(pools) == list(range(29 // size))
    zeros = np.zeros((earlier, 3), np.float32)
    padded = np.concatenate([zeros, x])
    for number, tokens in pools.items():
        np.testing.assert_array_equal(tokens, padded[number * size : number * size + earlier + size])


def test_weights_of_a_pool():
    values, gates = np.random.default_rng(5).normal(size=(2, 1, 2, 4, 3))
    found = weighted(jnp.asarray(values, jnp.float32), jnp.asarray(gates, jnp.float32))
    p = np.exp(gates) / np.exp(gates).sum(-2, keepdims=True)
    np.testing.assert_allclose(found, (p * values).sum(-2), atol=1e-6)
