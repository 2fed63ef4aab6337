"""The sparse attention kernels for a GPU against the references, interpreted on any device."""

import jax.numpy as jnp
import numpy as np
import pytest

from sparkjax.kernels.sparse_attention import reference as latent
from sparkjax.kernels.sparse_attention import triton
from sparkjax.kernels.sparse_gqa import reference as grouped
from sparkjax.kernels.sparse_gqa import triton as grouped_triton

SCALE, ATOL = 0.3, 2e-6


@pytest.fixture(autouse=True)
def short_spans(monkeypatch):
    monkeypatch.setattr(triton, "SPAN", 32)
    monkeypatch.setattr(triton, "PICKED", 32)


def chosen(rng, batch, count, table, page, k):
    """Page tables, and rising choices with gaps: int32 [B, Q, K]."""
    pages = rng.permutation(batch * table).reshape(batch, table).astype(np.int32)
    selected = np.full((batch, count, k), -1, np.int32)
    for b in range(batch):
        for i in range(count):
            n = rng.integers(0, k + 1)
            selected[b, i, :n] = np.sort(rng.choice(table * page, n, replace=False))
    return jnp.asarray(pages), jnp.asarray(selected)


def normal(rng, *shape):
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


@pytest.mark.parametrize("few", [0, pytest.param(16, marks=pytest.mark.slow)])
def test_latent_rows_shared_and_chosen(few, monkeypatch):
    monkeypatch.setattr(triton, "FEW", few)
    rng = np.random.default_rng(0)
    batch, count, heads, dim, value = 2, 3, 4, 48, 32
    pages, selected = chosen(rng, batch, count, 5, 8, 37)
    seen = rng.random((batch, count, 21)) < 0.4
    seen[1] = False
    rows = np.where(seen.any(1)[..., None], normal(rng, batch, 21, dim), np.nan)
    args = {
        "scale": SCALE,
        "value_dim": value,
        "rows": jnp.asarray(rows, jnp.float32),
        "seen": jnp.asarray(seen),
        "plane": normal(rng, 2, batch * 5, 8, dim),
        "layer": 1,
        "pages": pages,
        "selected": selected,
        "sinks": normal(rng, heads),
    }
    q = normal(rng, batch, count, heads, dim)
    expected = latent.latent_attention(q, **args)
    found = triton.latent_attention(q, **args, interpret=True)
    np.testing.assert_allclose(found, expected, atol=ATOL)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shared", "chosen"])
def test_latent_rows_of_one_kind(kind):
    rng = np.random.default_rng(1)
    q = normal(rng, 2, 2, 20, 32)
    if kind == "shared":
        seen = jnp.asarray(rng.random((2, 2, 40)) < 0.5)
        args = {"rows": normal(rng, 2, 40, 32), "seen": seen}
    else:
        pages, selected = chosen(rng, 2, 2, 4, 8, 19)
        plane = normal(rng, 2, 8, 8, 32)
        args = {"plane": plane, "layer": 0, "pages": pages, "selected": selected}
    expected = latent.latent_attention(q, scale=SCALE, value_dim=32, **args)
    found = triton.latent_attention(q, scale=SCALE, value_dim=32, **args, interpret=True)
    np.testing.assert_allclose(found, expected, atol=ATOL)


def test_chosen_keys_and_values():
    rng = np.random.default_rng(2)
    pages, selected = chosen(rng, 2, 2, 5, 8, 37)
    q, k, v = normal(rng, 2, 2, 6, 48), normal(rng, 2, 10, 8, 2, 48), normal(rng, 2, 10, 8, 2, 16)
    args = (q, k, v, 1, pages, selected)
    expected = grouped.sparse_attention(*args, scale=SCALE)
    found = grouped_triton.sparse_attention(*args, scale=SCALE, interpret=True)
    np.testing.assert_allclose(found, expected, atol=ATOL)
