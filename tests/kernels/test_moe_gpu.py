"""The GPU's expert layer: interpreted on the CPU in the default suite, on a GPU with `-m gpu`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import packed_weights as weights
import pytest

from sparkjax.kernels.linear import tuning
from sparkjax.kernels.linear.planes import spec_of
from sparkjax.kernels.moe import apart, experts, groups, reference, triton
from sparkjax.mesh.context import Context
from sparkjax.models.layers.mlp import silu
from sparkjax.weights import formats

TOLERANCE = 3e-3
"""Of a result that is rounded to bfloat16 twice."""


@pytest.mark.parametrize(
    ("tokens", "k", "count", "size"),
    [(1, 8, 288, 8), (64, 8, 32, 8), (40, 4, 5, 16)],
)
@pytest.mark.parametrize("compared", [0, 1 << 20])
def test_every_pair_is_in_one_tile_of_its_expert(monkeypatch, tokens, k, count, size, compared):
    monkeypatch.setattr(groups, "COMPARED", compared)
    rng = np.random.default_rng(2)
    ids = np.stack([rng.permutation(count)[:k] for _ in range(tokens)]).astype(np.int32)
    ids[tokens // 2 + 1 :: 3] = -1  # rows that are not there
    expert, pair = map(np.asarray, groups.tiles(jnp.asarray(ids), count, size))
    assert sorted(pair[pair >= 0]) == list(range(tokens * k))
    for one, members in zip(expert, pair, strict=True):
        members = members[members >= 0]
        assert (ids.reshape(-1)[members] == one).all()
        assert len(members) > 0 or one < 0
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


def interpreted(x, ids, share, planes, limit=None):
    run = jax.jit(
        lambda x, ids, share, p: triton.experts(
            x, ids, share, *p, jnp.int32(1), silu, limit, interpret=True
        )
    )
    return run(x, ids, share, planes)


SLOW = ("bf16", "fp8 block", "awq", "bf16 in 12 bits", "gguf Q4_1", "exl3 2.5 mul1",
        "exl3 3 mcg/e4m3", "gptq 4 bits ordered")  # fmt: skip


@pytest.mark.parametrize(
    "kind", ["nvfp4", *(pytest.param(k, marks=pytest.mark.slow) for k in SLOW)]
)
def test_equals_the_reference_interpreted(kind):
    planes = layer(kind, 4, 128, 128)
    x, ids, share = tokens_of(3, 2, 4, 128)
    y = interpreted(x, ids, share, planes, 0.5)
    assert weights.relative(y, exact(x, ids, share, planes, 0.5)) < TOLERANCE


@pytest.mark.parametrize("kind", ["fp8 block", pytest.param("exl3 2 mcg", marks=pytest.mark.slow)])
@pytest.mark.parametrize("rows", [3, pytest.param(300, marks=pytest.mark.slow)])
def test_a_token_of_no_experts_is_zeros(kind, rows):
    planes = layer(kind, 4, 128, 1024)  # up to 64 rows, sums of gate and up are cut
    x, ids, share = tokens_of(rows, 2, 4, 1024)
    full, none = interpreted(x, ids, share, planes), ids.at[1].set(-1)
    for y in (interpreted(x, none, share, planes), exact(x, none, share, planes)):
        assert (y[1] == 0).all()
    np.testing.assert_array_equal(interpreted(x, none, share, planes), full.at[1].set(0))


def cut_experts(kinds, count, width, hidden, cut):
    """Experts of these kinds in turn, of which a rank has a slice that ends inside of blocks."""
    into = [
        weights.stacked(kinds, (2, count), width, hidden, formats.ROWS, cut, seed) for seed in (1, 2)
    ]
    return [*into, weights.stacked(kinds[::-1], (2, count), hidden, width, formats.COLS, cut, 3)]


CUT = {
    "one rate": (("exl3 2 mcg",), None),
    "one rate, cut": (("exl3 2 mcg",), (50, 170)),
    "three rates, cut": (("exl3 2 mcg", "exl3 3 3inst", "exl3 2.5 mul1"), (50, 170)),
    "other formats too": (("exl3 2 mcg", "nvfp4", "fp8 channel"), None),
}


def in_bases(name, rows):
    """Experts of CUT, some tokens, and what they come out as."""
    kinds, cut = CUT[name]
    planes = cut_experts(kinds, 5, 256, 128, cut)
    tokens = tokens_of(rows, 3, 5, 128)
    return planes, tokens, interpreted(*tokens, planes)


def test_a_projection_in_bases_of_experts():
    w = weights.stacked(("exl3 2 mcg",), (2, 4), 128, 256, formats.COLS, (50, 170))
    x, ids, share = tokens_of(3, 3, 4, 120)

    def run(x, ids, share, w):
        choice = apart.Choice(ids, *groups.tiles(ids, 4, 8))
        return apart.project(x, w, jnp.int32(1), choice, share, interpret=True)

    def expected(x, ids, share, w):
        every = jnp.einsum("th,enh->ten", x.astype(jnp.float32), w.dequantize(1))
        return (share[:, :, None] * jnp.take_along_axis(every, ids[:, :, None], 1)).sum(1)

    found, wanted = (jax.jit(f)(x, ids, share, w) for f in (run, expected))
    assert weights.relative(found, wanted) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", CUT)
def test_experts_in_bases_of_their_own(name):
    planes, (x, ids, share), y = in_bases(name, 3)
    # A rotation's inputs are not rounded to bfloat16.
    allowed = 2e-3 if all(kind.startswith("exl3") for kind in CUT[name][0]) else TOLERANCE
    assert weights.relative(y, exact(x, ids, share, planes)) < allowed


@pytest.mark.slow
@pytest.mark.parametrize("name", CUT)
def test_rows_in_bases_of_their_own_do_not_depend_on_others(name):
    planes, (x, ids, share), y = in_bases(name, 7)
    np.testing.assert_array_equal(interpreted(x[1:2], ids[1:2], share[1:2], planes)[0], y[1])


def test_what_it_takes():
    gate, up, down = layer("nvfp4", 2, 64, 64)
    other, rotated = (weights.weight(kind, (2, 2), 64, 64) for kind in ("bf16", "exl3 2 mcg"))
    x = weights.rows(1, 64)
    for planes in ((gate, up, down), (gate, other, down), (rotated, rotated, down)):
        assert triton.supports(x, *planes) is None
    assert "multiple of 16" in triton.supports(x, gate, up, jnp.zeros((2, 2, 64, 40), jnp.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["fp8 block", "nvfp4", "int4", "exl3 2 mcg", "gguf Q4_K"])
def test_sums_in_parts_on_a_gpu(kind):
    context = Context("bfloat16", platform="cuda", kernels=(("moe", "triton"),))
    planes = layer(kind, 12, 2048, 2048)
    specs = [spec_of(w) for w in planes]
    tile = tuning.expert_tile(specs[0], 64, 8, 4, 2)
    assert tile.splits > 1 and tile == tuning.expert_tile(specs[0], 1, 8, 4, 2)
    x, ids, share = tokens_of(64, 4, 12, 2048)
    run = jax.jit(lambda x, ids, share, p: experts(x, ids, share, *p, 1, silu, context=context))
    full = run(x, ids, share, planes)
    assert weights.relative(full, exact(x, ids, share, planes)) < TOLERANCE
    for rows in (1, 2, 7, 40):
        np.testing.assert_array_equal(run(x[:rows], ids[:rows], share[:rows], planes), full[:rows])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [*weights.FORMATS, "gptq 4 bits ordered", *CUT])
def test_equals_the_reference_on_a_gpu(kind):
    context = Context("bfloat16", platform="cuda", kernels=(("moe", "triton"),))
    planes = (
        cut_experts(CUT[kind][0], 12, 512, 512, CUT[kind][1])
        if kind in CUT
        else layer(kind, 12, 384, 512)
    )
    x, ids, share = tokens_of(300, 4, 12, 512)
    run = jax.jit(lambda x, ids, share, p: experts(x, ids, share, *p, 1, silu, context=context))
    full = run(x[:64], ids[:64], share[:64], planes)
    assert weights.relative(full, exact(x[:64], ids[:64], share[:64], planes)) < TOLERANCE
    for rows in (1, 2, 7, 16, 40):
        few = run(x[:rows], ids[:rows], share[:rows], planes)
        np.testing.assert_array_equal(few, full[:rows])
    for rows in (2, 40, 300):
        all_but_one = run(x[:rows], ids[:rows].at[1].set(-1), share[:rows], planes)
        assert (all_but_one[1] == 0).all() and jnp.isfinite(all_but_one).all()
        np.testing.assert_array_equal(all_but_one[0], run(x[:rows], ids[:rows], share[:rows], planes)[0])
    assert weights.relative(run(x, ids, share, planes), exact(x, ids, share, planes)) < TOLERANCE
