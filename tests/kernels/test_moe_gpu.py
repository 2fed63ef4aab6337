"""The GPU's expert layer: interpreted on the CPU in the default suite, on a GPU with `-m gpu`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import packed_weights as weights
import pytest

from sparkjax.kernels.moe import experts, groups, reference, triton
from sparkjax.mesh.context import Context
from sparkjax.models.layers.mlp import silu

TOLERANCE = 3e-3
"""Of a result that is rounded to bfloat16 twice."""


@pytest.mark.parametrize(
    ("tokens", "k", "count", "size"),
    [(1, 8, 288, 8), (8, 8, 288, 8), (64, 8, 32, 8), (40, 4, 5, 16)],
)
@pytest.mark.parametrize("compared", [0, 1 << 20])
def test_every_pair_is_in_one_tile_of_its_expert(monkeypatch, tokens, k, count, size, compared):
    monkeypatch.setattr(groups, "COMPARED", compared)
    rng = np.random.default_rng(2)
    ids = np.stack([rng.permutation(count)[:k] for _ in range(tokens)]).astype(np.int32)
    expert, pair = map(np.asarray, groups.tiles(jnp.asarray(ids), count, size))
    assert sorted(pair[pair >= 0]) == list(range(tokens * k))
    for one, members in zip(expert, pair, strict=True):
        members = members[members >= 0]
        assert (ids.reshape(-1)[members] == one).all()
        assert (len(members) > 0) == (one >= 0)
        assert (np.diff(members) > 0).all()
    full = sum(-(-int((ids == e).sum()) // size) for e in range(count))
    assert (expert >= 0).sum() == full


def layer(kind, count, width, hidden):
    shapes = ((width, hidden), (width, hidden), (hidden, width))
    return [weights.weight(kind, (2, count), *s, seed=i) for i, s in enumerate(shapes)]


def tokens_of(tokens, k, count, hidden):
    rng = np.random.default_rng(3)
    ids = np.stack([rng.permutation(count)[:k] for _ in range(tokens)]).astype(np.int32)
    share = rng.uniform(0.1, 1, (tokens, k)).astype(np.float32)
    return weights.rows(tokens, hidden) / 1024, jnp.asarray(ids), jnp.asarray(share)


def exact(x, ids, share, planes, limit=None):
    run = jax.jit(lambda x, ids, share, p: reference.experts(x, ids, share, *p, 1, silu, limit))
    return run(x.astype(jnp.float32), ids, share, planes)


SLOW = ("bf16", "fp8 block", "awq", "bf16 in 12 bits", "gguf Q4_1")


@pytest.mark.parametrize(
    "kind", ["nvfp4", *(pytest.param(k, marks=pytest.mark.slow) for k in SLOW)]
)
def test_equals_the_reference_interpreted(kind):
    planes = layer(kind, 4, 128, 128)
    x, ids, share = tokens_of(3, 2, 4, 128)
    run = jax.jit(lambda *a: triton.experts(*a[:3], *a[3], jnp.int32(1), silu, 0.5, interpret=True))
    y = run(x, ids, share, planes)
    assert weights.relative(y, exact(x, ids, share, planes, 0.5)) < TOLERANCE


def test_gate_and_up_must_be_alike():
    gate, up, down = layer("nvfp4", 2, 64, 64)
    other = weights.weight("bf16", (2, 2), 64, 64)
    x = weights.rows(1, 64)
    assert triton.supports(x, gate, up, down) is None
    assert "different formats" in triton.supports(x, gate, other, down)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", weights.FORMATS)
def test_equals_the_reference_on_a_gpu(kind):
    context = Context("bfloat16", platform="cuda", kernels=(("moe", "triton"),))
    planes = layer(kind, 12, 384, 512)
    x, ids, share = tokens_of(300, 4, 12, 512)
    run = jax.jit(lambda x, ids, share, p: experts(x, ids, share, *p, 1, silu, context=context))
    full = run(x[:64], ids[:64], share[:64], planes)
    assert weights.relative(full, exact(x[:64], ids[:64], share[:64], planes)) < TOLERANCE
    for rows in (1, 2, 7, 16, 40):
        few = run(x[:rows], ids[:rows], share[:rows], planes)
        np.testing.assert_array_equal(few, full[:rows])
    assert weights.relative(run(x, ids, share, planes), exact(x, ids, share, planes)) < TOLERANCE
