"""The two-level indexer: blocks by their best row, and a choice inside them only."""

import jax.numpy as jnp
import numpy as np
import pytest

from sparkjax.kernels import blocks as walking
from sparkjax.kernels.candidates import reference
from sparkjax.kernels.indexer.reference import index_scores

SIZE, SCALE = 3, 0.4


def case(seed: int = 0):
    """Two sequences of 32 rows in pages of 4, 9 queries each."""
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(2, 9, 4, 8)).astype(np.float32)
    weights = rng.normal(size=(2, 9, 4)).astype(np.float32)
    plane = rng.normal(size=(2, 20, 4, 8)).astype(np.float32)
    pages = rng.permutation(20)[:16].reshape(2, 8).astype(np.int32)
    limit = rng.integers(0, 33, size=(2, 9)).astype(np.int32)
    limit[0, :3] = 0, 1, 32
    keys = plane[1, pages].reshape(2, 32, 8)
    scores = np.asarray(index_scores(jnp.asarray(q), jnp.asarray(keys), jnp.asarray(weights), SCALE))
    return tuple(map(jnp.asarray, (q, weights, plane))), pages, limit, scores


def pick(arrays, pages, limit, k):
    q, weights, plane = arrays
    return np.asarray(
        reference.pick_blocks(q, weights, plane, 1, pages, limit, k=k, size=SIZE, scale=SCALE)
    )


@pytest.mark.parametrize("budget", [walking.BUDGET, 1])
@pytest.mark.parametrize("k", [4, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 11))])
def test_blocks_with_the_best_rows_and_the_newest(k, budget, monkeypatch):
    monkeypatch.setattr(walking, "BUDGET", budget)
    arrays, pages, limit, scores = case()
    found = pick(arrays, pages, limit, k)
    for b in range(2):
        for i in range(9):
            seen = int(limit[b, i])
            if not seen:
                assert (found[b, i] == -1).all()
                continue
            rows = scores[b, i, :seen]
            best = [rows[at : at + SIZE].max() for at in range(0, seen, SIZE)]
            best[(seen - 1) // SIZE] = np.inf
            expected = sorted(np.argsort(-np.array(best), kind="stable")[:k])
            assert found[b, i].tolist() == expected + [-1] * (k - len(expected))


@pytest.mark.parametrize("budget", [walking.BUDGET, 1])
@pytest.mark.parametrize("k", [7, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 20))])
def test_chooses_inside_the_blocks(k, budget, monkeypatch):
    monkeypatch.setattr(walking, "BUDGET", budget)
    arrays, pages, limit, scores = case(1)
    q, weights, plane = arrays
    blocks = pick(arrays, pages, limit, 4)
    found = np.asarray(
        reference.select_within(
            q, weights, plane, 1, pages, limit, blocks, k=k, size=SIZE, scale=SCALE
        )
    )
    for b in range(2):
        for i in range(9):
            rows = [r for c in blocks[b, i] if c >= 0 for r in range(c * SIZE, (c + 1) * SIZE)]
            rows = [r for r in rows if r < limit[b, i]]
            expected = sorted(sorted(rows, key=lambda r: (-scores[b, i, r], r))[:k])
            assert found[b, i].tolist() == expected + [-1] * (k - len(expected))
