"""The attention kernels for a GPU against the reference, interpreted on any device."""

import jax.numpy as jnp
import numpy as np
import pytest

from sparkjax.kernels.attention import reference, triton

LAYER, SCALE = 1, 0.3


@pytest.fixture(autouse=True)
def short_spans(monkeypatch):
    """Few keys a span, so that short sequences have several."""
    monkeypatch.setattr(triton, "SPAN", 16)
    monkeypatch.setattr(triton, "SPLITS", 4)


def paged(count, start, lengths, page=4, heads=4, kv_heads=2, dim=32, dim_v=48, seed=0):
    """Rows over shuffled pages; places that no token was written to hold NaN."""
    rng = np.random.default_rng(seed)
    rows = len(start)
    table = -(-(max(start) + count) // page) + 1
    k = np.full((2, rows * table + 1, page, kv_heads, dim), np.nan, np.float32)
    v = np.full((*k.shape[:4], dim_v), np.nan, np.float32)
    pages = rng.permutation(rows * table).reshape(rows, table).astype(np.int32)
    for row in range(rows):
        for position in range(start[row] + lengths[row]):
            at = LAYER, pages[row, position // page], position % page
            k[at], v[at] = rng.normal(size=(kv_heads, dim)), rng.normal(size=(kv_heads, dim_v))
    q = rng.normal(size=(rows, count, heads, dim)).astype(np.float32)
    arrays = q, k, v, np.int32(LAYER), pages, np.int32(start), np.int32(lengths)
    return tuple(map(jnp.asarray, arrays))


def compare(args, **settings):
    expected = reference.paged_attention(*args, scale=SCALE, **settings)
    found = triton.paged_attention(*args, scale=SCALE, **settings, interpret=True)
    np.testing.assert_allclose(found, expected, atol=2e-6)


@pytest.mark.parametrize("page", [4, pytest.param(32, marks=pytest.mark.slow)])
def test_decode(page):
    compare(paged(1, [0, 37, 90, 5], [1, 1, 1, 0], page))


@pytest.mark.slow
def test_verification_with_sinks_and_softcap():
    sinks = jnp.asarray([0.3, -1.0, 2.0, 0.0])
    compare(paged(5, [0, 29, 61], [5, 5, 2]), softcap=2.0, sinks=sinks)


@pytest.mark.parametrize("window", [21, pytest.param(0, marks=pytest.mark.slow)])
def test_prefill(window):
    compare(paged(40, [0, 50], [40, 33], page=32), window=window)


@pytest.mark.slow
def test_bits_depend_neither_on_rows_nor_on_tokens():
    q, k, v, layer, pages, start, lengths = paged(4, [13, 30], [4, 4])
    whole = triton.paged_attention(
        q, k, v, layer, pages, start, lengths, scale=SCALE, interpret=True
    )
    for row in range(2):
        for t in range(4):
            alone = triton.paged_attention(
                q[row : row + 1, t : t + 1], k, v, layer, pages[row : row + 1],
                start[row : row + 1] + t, jnp.ones(1, jnp.int32), scale=SCALE, interpret=True,
            )  # fmt: skip
            np.testing.assert_array_equal(alone[0, 0], whole[row, t])


@pytest.mark.parametrize("count", [3, *[pytest.param(n, marks=pytest.mark.slow) for n in (1, 20)]])
def test_rings(count):
    rng = np.random.default_rng(count)
    window, size, start, lengths = 20, 22, [0, 9, 75], [count, count, max(count - 2, 0)]
    new = (
        rng.normal(size=(3, count, 6, 32)),
        rng.normal(size=(3, count, 2, 32)),
        rng.normal(size=(3, count, 2, 16)),
    )
    q, k, v = (jnp.asarray(x, jnp.float32) for x in new)
    rings = np.full((2, 5, size, 2, 48), np.nan, np.float32)
    slots = np.int32([4, 0, 2])
    for row in range(3):
        for position in range(max(start[row] - size, 0), start[row]):
            rings[LAYER, slots[row], position % size] = rng.normal(size=(2, 48))
    planes = jnp.asarray(rings[..., :32]), jnp.asarray(rings[..., 32:])
    args = (q, k, v, *planes, LAYER, slots, jnp.int32(start), jnp.int32(lengths))
    settings = {"window": window, "scale": SCALE, "sinks": jnp.linspace(-1, 1, 6)}
    expected = reference.ring_attention_cached(*args, **settings)
    found = triton.ring_attention(*args, **settings, interpret=True)
    np.testing.assert_allclose(found, expected, atol=2e-6)
