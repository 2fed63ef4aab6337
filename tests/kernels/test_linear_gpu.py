"""The GPU's `linear`: interpreted on the CPU in the default suite, on a GPU with `-m gpu`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import packed_weights as weights
import pytest

from sparkjax.kernels.linear import linear, linear_group, panels, reference, rotated, triton, tuning
from sparkjax.kernels.linear.planes import planes_of, spec_of
from sparkjax.kernels.linear.tile import Tile
from sparkjax.mesh.context import Context
from sparkjax.weights import formats
from sparkjax.weights.formats import exl3

TOLERANCE = 2e-3
"""Of a result that is rounded to bfloat16 once."""
QUICK = (
    "fp8 block", "mxfp8", "nvfp4", "mxfp4", "gptq v1", "awq", "bf16 in 12 bits", "gptq 3 bits by 32",
    "exl3 4 mcg", "exl3 1.5 mul1", "gguf Q4_1", "gguf Q4_K",
)  # fmt: skip
ALL = (*weights.FORMATS, *weights.VARIANTS, *weights.EXL3, *weights.GGUF)
KINDS = [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in ALL]


def exact(x, w, layer=None):
    """In float32."""
    return jax.jit(reference.linear)(x.astype(jnp.float32), w, layer)


def outputs(kind):
    """What does not fill a tile, where the format allows it."""
    return 64 if "planar" in kind or "gguf" in kind else 40


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_reference_interpreted(kind):
    w, x = weights.weight(kind, (2,), outputs(kind), 256), weights.rows(3, 256)
    tile = tuning.tile_for(spec_of(w), 3)
    form = {"tile": tile, "interpret": True}
    y = jax.jit(lambda x, w: triton.linear(x, w, jnp.int32(1), **form))(x, w)
    whole = jax.jit(lambda x, w: triton.linear(x, w, jnp.int32(1), dtype=jnp.float32, **form))(x, w)
    # The rounding of so few results scatters about the tolerance.
    assert weights.relative(whole, exact(x, w, 1)) < TOLERANCE / 2
    np.testing.assert_array_equal(y, whole.astype(jnp.bfloat16))


@pytest.mark.parametrize(("rows", "outputs"), [(3, 40), (3, 1), (80, 40)])
def test_a_router_keeps_float32(rows, outputs):
    """Products of bfloat16 are exact in float32; with more rows than decode has, too."""
    w, x = weights.weight("bf16", (2,), outputs, 256), weights.rows(rows, 256)
    y = jax.jit(lambda x, w: triton.linear(x, w, 1, dtype=jnp.float32, interpret=True))(x, w)
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y, reference.linear_float32(x, w, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [k for k in KINDS if k.values[0] != "bf16"])
def test_panels_are_the_dequantized_weights(kind):
    w = weights.weight(kind, (2,), outputs(kind), 256)
    spec, tile = spec_of(w), tuning.many(spec_of(w))[0]
    run = lambda w: panels.decoded(  # noqa: E731
        spec, planes_of(w), jnp.ones(1, jnp.int32), 16, 24, tile, True
    )
    expected = (w.inner if spec.ordered else w).dequantize(1, jnp.bfloat16)[16:40]
    if spec.code == "trellis":
        spec = rotated.padded(spec)
        expected = jax.jit(exl3.decode, static_argnums=(1, 2))(w.trellis[1], w.codebook, w.as_e4m3)
        expected = expected[16:40]
    np.testing.assert_array_equal(jax.jit(run)(w).astype(jnp.float32), expected.astype(jnp.float32))


def test_panels_go_into_their_columns(monkeypatch):
    monkeypatch.setattr(panels, "PANEL", 2 * 256 * 16)
    w, x = weights.weight("nvfp4", (), 40, 256), weights.rows(20, 256)
    run = lambda x, w: panels.linear(  # noqa: E731
        spec_of(w), x, planes_of(w), jnp.zeros(1, jnp.int32), Tile(16, 16), Tile(16, 128, 16), True
    )
    assert weights.relative(jax.jit(run)(x, w), reference.linear(x, w)) < 1e-4


GROUP = (("fp8 block", 256), ("fp8 block", 40), ("nvfp4", 64), ("fp8 block", 64), ("nvfp4", 200),
         ("exl3 2 mcg", 40), ("bf16", 8))  # fmt: skip
"""What one x meets: weights of unequal outputs, some of them alike."""


def equal_alone(x, stacks, interpret):
    together = jax.jit(lambda x, w: triton.linear_group(x, w, 1, interpret=interpret))(x, stacks)
    alone = jax.jit(lambda x, w: [triton.linear(x, v, 1, interpret=interpret) for v in w])
    for y, expected in zip(together, alone(x, stacks), strict=True):
        np.testing.assert_array_equal(y, expected)


def test_a_group_has_the_bits_of_each_alone():
    stacks = [weights.weight(kind, (2,), n, 256, seed=i) for i, (kind, n) in enumerate(GROUP)]
    equal_alone(weights.rows(3, 256), stacks, interpret=True)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 33, 64, 80])
def test_a_group_has_the_bits_of_each_alone_on_a_gpu(rows):
    kinds = ("bf16", "fp8 block", "nvfp4", "int4", "awq", "bf16 in 12 bits", "exl3 2 mcg", "gguf Q4_K")
    stacks = [weights.weight(k, (2,), n, 2048, seed=n) for k in kinds for n in (1024, 64, 992)]
    equal_alone(weights.rows(rows, 2048), stacks, interpret=False)


def test_refusals_name_their_reason():
    x = weights.rows(1, 256)
    assert "bfloat16 is supported" in triton.supports(x.astype(jnp.float32), jnp.zeros((4, 256)))
    assert "multiple of 16" in triton.supports(x, jnp.zeros((4, 40), jnp.bfloat16))
    with pytest.raises(ValueError, match="x has 256 columns, the weight 128"):
        triton.linear(x, jnp.zeros((4, 128), jnp.bfloat16))


@pytest.mark.parametrize("rows", [1, 2, 17, 64])
def test_what_decides_bits_does_not_depend_on_rows(rows):
    for kind in ALL:
        spec = spec_of(weights.weight(kind, (), 64, 1024))
        one, many = tuning.tile_for(spec, 1), tuning.tile_for(spec, rows)
        assert (one.words, one.splits) == (many.words, many.splits)


def tiles(spec):
    """Every tile that a weight may be read in."""
    decode = [tuning.tile_for(spec, rows) for rows in (1, 64)]
    experts = [
        tuning.expert_tile(spec, n, tuning.expert_rows([spec], n, 2, 8), 2, weights)
        for n in (8, 100)
        for weights in (1, 2)
    ]
    return [*decode, *experts, *tuning.many(spec)]


@pytest.mark.parametrize("k", [16, 48, 96, 176, 576, 1152, 5120])
def test_sizes_are_powers_of_two_and_within_a_block_scale(k):
    for kind in ("bf16", "fp8 channel", "fp8 block", "int4", "gptq v1", "int4 by 32", "awq by 16"):
        spec = spec_of(weights.weight(kind, (), 24, k))
        for tile in tiles(spec):
            for size in (tile.outputs, tile.words, tile.rows):
                assert size & (size - 1) == 0 and size >= 8
        if spec.step < spec.words:
            assert all(spec.step % tile.words == 0 for tile in tiles(spec)[:-1])


def test_each_member_of_a_mixed_stack_has_its_own_kernel():
    alone = [weights.weight(kind, (1,), 64, 256) for kind in ("nvfp4", "fp8 channel")]
    members = [jax.tree.map(lambda a: np.asarray(a[0]), w) for w in alone]
    order = [1, 0, 0, 1]
    stack = formats.stack([members[kind] for kind in order], (4,))
    assert "no kernel for Mixed" in spec_of(stack)
    context, x = Context("bfloat16"), weights.rows(3, 256)
    run = jax.jit(lambda x, w, layer: linear(x, w, layer, context=context))
    for layer, kind in enumerate(order):
        expected = run(x, alone[kind], jnp.int32(0))
        assert (run(x, stack, jnp.int32(layer)) == expected).all()
        assert (linear(x, stack, layer, context=context) == expected).all()
        [first, _] = linear_group(x, [stack, stack], layer, context=context)
        assert (first == expected).all()


def test_rotations_keep_all_bits_of_a_float32():
    # Operation by operation: inside of one program XLA may leave out the roundings.
    rng = np.random.default_rng(4)
    values = (rng.standard_normal((16, 128)) * np.exp2(rng.integers(-20, 20, (16, 1)))).astype("f4")
    sign = exl3.hadamard()
    found = rotated._times_signs(jnp.asarray(values), jnp.asarray(sign), interpret=False)
    exactly = values.astype(np.float64) @ sign
    assert (np.abs(found - exactly).max(1) < 1e-5 * np.abs(values).max(1)).all()


@pytest.mark.parametrize("axis", [formats.COLS, pytest.param(formats.ROWS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["exl3 2 mcg", pytest.param("gguf Q4_K", marks=pytest.mark.slow)])
def test_what_is_cut_inside_of_a_block(kind, axis):
    member = jax.tree.map(np.asarray, weights.weight(kind, (), 256, 256))
    index = np.concatenate([np.arange(100, 190), [-1, -1, 7]])
    node = formats.stack([formats.pick(member, axis, index)] * 2, (2,))
    x = weights.rows(3, node.shape[-1])
    assert triton.supports(x, node) is None
    y = jax.jit(lambda x, w: triton.linear(x, w, jnp.int32(1), interpret=True))(x, node)
    assert weights.relative(y, exact(x, node, 1)) < TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize(("n", "k"), [(64, 256), (512, 2048), (992, 4224)])
def test_equals_the_reference_on_a_gpu(kind, n, k):
    context = Context("bfloat16", platform="cuda", kernels=(("linear", "triton"),))
    w = weights.weight(kind, (2,), n, k)
    x = weights.rows(300, w.shape[-1])  # some types have whole blocks of 256 inputs
    run = jax.jit(lambda x, w: linear(x, w, 1, context=context))
    full = run(x[:64], w)
    assert weights.relative(full, exact(x[:64], w, 1)) < TOLERANCE
    for rows in (1, 2, 5, 8, 16, 33, 63):
        np.testing.assert_array_equal(run(x[:rows], w), full[:rows])
    np.testing.assert_array_equal(run(x[7:8], w)[0], full[7])
    # With many rows, weights are rounded to bfloat16 as well, but for EXL3's, which stay float16.
    assert weights.relative(run(x[:100], w), exact(x[:100], w, 1)) < 1.5 * TOLERANCE
    many = exact(x, w, 1) if kind.startswith("exl3") else jax.jit(reference.linear)(x, w, 1)
    assert weights.relative(run(x, w), many) < TOLERANCE
