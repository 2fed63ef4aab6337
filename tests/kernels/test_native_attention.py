"""The native paged attention and paged write against plain numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparkjax.kernels import native
from sparkjax.kernels.attention import native as op

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.why_not()))


def expected(q, k, v, layer, table, start, lengths, *, scale, window=0, softcap=0.0, sinks=None):
    """In float64, one query at a time."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    b, n, heads, _ = q.shape
    size, kv_heads = k.shape[2:4]
    out = np.zeros((b, n, heads, v.shape[-1]))
    for r in range(b):
        for i in range(lengths[r]):
            p = start[r] + i
            seen = np.arange(max(0, p - window + 1) if window else 0, p + 1)
            places = (layer, table[r, seen // size], seen % size)
            for h in range(heads):
                kv = h // (heads // kv_heads)
                logits = k[places][:, kv] @ q[r, i, h] * scale
                if softcap:
                    logits = softcap * np.tanh(logits / softcap)
                top = logits.max() if sinks is None else max(logits.max(), sinks[h])
                weights = np.exp(logits - top)
                total = weights.sum() + (0 if sinks is None else np.exp(sinks[h] - top))
                out[r, i, h] = weights @ v[places][:, kv] / total
    return out


def problem(
    *, batch, queries, start, lengths, heads=6, kv_heads=2, dim=64, value_dim=64, size=16,
    layers=2, seed=0,
):  # fmt: skip
    """Planes full of NaN but for the tokens that exist, in pages dealt out at random."""
    random = np.random.default_rng(seed)
    start, lengths = np.asarray(start, np.int32), np.asarray(lengths, np.int32)
    t = int((start + queries).max()) // size + 1
    pages = batch * t + 3
    table = random.permutation(pages)[: batch * t].reshape(batch, t).astype(np.int32)
    k = np.full((layers, pages, size, kv_heads, dim), np.nan, np.float32)
    v = np.full((layers, pages, size, kv_heads, value_dim), np.nan, np.float32)
    for b in range(batch):
        p = np.arange(start[b] + lengths[b])
        where = (slice(None), table[b, p // size], p % size)
        k[where] = random.standard_normal(k[where].shape)
        v[where] = random.standard_normal(v[where].shape)
    q = random.standard_normal((batch, queries, heads, dim)).astype(np.float32)
    return q, k, v, 1, table, start, lengths


compiled_attention = jax.jit(op.paged_attention, static_argnames=("scale", "window", "softcap"))


def run(*arguments, **attributes):
    return np.asarray(compiled_attention(*arguments, **attributes))


def same_bits(a, b):
    np.testing.assert_array_equal(np.asarray(a).view(np.int32), np.asarray(b).view(np.int32))


def close(a, b):
    np.testing.assert_allclose(a, b, atol=3e-6, rtol=3e-5)


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"heads": 9, "kv_heads": 3},
        {"heads": 2, "dim": 80, "value_dim": 48},
        {"dim": 5, "value_dim": 7, "size": 3},
        {"size": 256, "dim": 128, "value_dim": 128},
    ],
)
@pytest.mark.parametrize("attributes", [{}, {"window": 40}, {"softcap": 3.0}])
def test_equals_numpy(shape, attributes):
    p = problem(batch=4, queries=21, start=[0, 130, 5, 300], lengths=[21, 20, 0, 3], **shape)
    result = run(*p, scale=0.3, **attributes)
    close(result, expected(*p, scale=0.3, **attributes))
    assert not result[2].any() and not result[3, 3:].any()


def test_sinks():
    p = problem(batch=2, queries=3, start=[0, 200], lengths=[3, 2])
    sinks = np.array([-3, -1, 0, 2, 5, 40], np.float32)
    result = np.asarray(op.paged_attention(*p, scale=0.2, sinks=jnp.asarray(sinks)))
    close(result, expected(*p, scale=0.2, sinks=sinks))


@pytest.mark.parametrize("window", [0, 1, 150])
def test_query_is_the_same_in_any_tile(window):
    """64 queries of a row at once, in tiles, and one at a time; alone and in company."""
    n, begin = 64, 250
    q, k, v, layer, table, start, lengths = problem(
        batch=3, queries=n, start=[begin, 3, 800], lengths=[n, 9, n], heads=9, kv_heads=3
    )
    whole = run(q, k, v, layer, table, start, lengths, scale=0.125, window=window)
    for size in (1, 5, 16, 24):
        for row in (0, 2):
            for i in range(0, n, size):
                tile = q[row : row + 1, i : i + size]
                count = np.array([tile.shape[1]], np.int32)
                part = run(
                    tile, k, v, layer, table[row : row + 1], start[row : row + 1] + i, count,
                    scale=0.125, window=window,
                )  # fmt: skip
                same_bits(part[0], whole[row, i : i + size])


def test_decode_rows_are_the_same_in_any_company():
    starts = [0, 17, 127, 128, 511, 1000, 2047, 64]
    q, k, v, layer, table, start, lengths = problem(
        batch=8, queries=1, start=starts, lengths=[1] * 8, heads=9, kv_heads=3
    )
    whole = run(q, k, v, layer, table, start, lengths, scale=0.125)
    close(whole, expected(q, k, v, layer, table, start, lengths, scale=0.125))
    order = np.random.default_rng(1).permutation(8)
    mixed = run(
        q[order], k, v, layer, table[order], start[order], lengths[order], scale=0.125
    )  # fmt: skip
    same_bits(mixed, whole[order])
    for b in range(8):
        one = slice(b, b + 1)
        same_bits(
            run(q[one], k, v, layer, table[one], start[one], lengths[one], scale=0.125), whole[one]
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_write_touches_its_places_only(dtype):
    layers, pages, size, batch, queries = 3, 12, 4, 3, 9
    random = np.random.default_rng(0)
    table = random.permutation(pages).reshape(batch, 4).astype(np.int32)
    start, lengths = np.array([3, 0, 5], np.int32), np.array([9, 0, 4], np.int32)
    plane = random.integers(-100, 100, (layers, pages, size, 2, 5)).astype(dtype)
    rows = random.integers(-100, 100, (batch, queries, 2, 5)).astype(np.float32)
    for b in range(batch):
        rows[b, lengths[b] :] = 77 if dtype == "int8" else np.nan
    wanted = np.array(plane)
    for b in range(batch):
        for i in range(lengths[b]):
            p = start[b] + i
            wanted[1, table[b, p // size], p % size] = rows[b, i].astype(dtype)
    result = jax.jit(op.paged_write)(jnp.asarray(plane), rows, 1, table, start, lengths)
    np.testing.assert_array_equal(np.asarray(result), wanted)


def test_write_past_the_table_is_dropped():
    plane = jnp.zeros((1, 2, 4, 3))
    table, start, lengths = np.array([[1]]), np.array([2]), np.array([5])
    result = np.asarray(op.paged_write(plane, jnp.ones((1, 5, 3)), 0, table, start, lengths))
    assert result[0, 1, 2:].all() and not result[0, 1, :2].any() and not result[0, 0].any()


def test_layers_under_scan_copy_no_plane():
    """Writes, then attends, layer after layer, with the donated planes as the carry."""
    layers = 4
    q, k, v, _, table, start, lengths = problem(
        batch=2, queries=3, start=[30, 100], lengths=[3, 2], layers=layers, size=64
    )
    k, v = np.nan_to_num(k), np.nan_to_num(v)
    rows = np.random.default_rng(4).standard_normal((2, 3, 2, 64)).astype(np.float32)

    def step(k, v, q):
        def layer(carry, i):
            k, v, total = carry
            k = op.paged_write(k, rows + i, i, table, start, lengths)
            v = op.paged_write(v, rows - i, i, table, start, lengths)
            y = op.paged_attention(q, k, v, i, table, start, lengths, scale=0.1)
            return (k, v, total + y), None

        return jax.lax.scan(layer, (k, v, jnp.zeros_like(q)), jnp.arange(layers))[0]

    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(k, v, q).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < k.nbytes // layers
    wanted_k, wanted_v, total = k.copy(), v.copy(), np.zeros(q.shape)
    for i in range(layers):
        for b in range(2):
            for j in range(lengths[b]):
                p = start[b] + j
                wanted_k[i, table[b, p // 64], p % 64] = rows[b, j] + i
                wanted_v[i, table[b, p // 64], p % 64] = rows[b, j] - i
        total += expected(q, wanted_k, wanted_v, i, table, start, lengths, scale=0.1)
    k2, v2, y = compiled(jnp.asarray(k), jnp.asarray(v), q)
    np.testing.assert_array_equal(k2, wanted_k)
    np.testing.assert_array_equal(v2, wanted_v)
    np.testing.assert_allclose(y, total, atol=3e-5, rtol=3e-5)


def test_refusals():
    q, k, v, *rest = problem(batch=1, queries=1, start=[0], lengths=[1])
    assert op.supports(q, k, v) is None
    assert "bfloat16" in op.supports(q, jnp.asarray(k, jnp.bfloat16), v)
    with pytest.raises(ValueError, match="heads"):
        op.paged_attention(q[:, :, :5], k, v, *rest, scale=1.0)
    with pytest.raises(ValueError, match="shapes"):
        op.paged_write(k, q, 0, rest[1], rest[2], rest[3])
