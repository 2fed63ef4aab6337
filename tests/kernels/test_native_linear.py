"""The native `linear` and `embed` against the gguf library's decoding and numpy."""

from __future__ import annotations

from types import SimpleNamespace

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparkjax.kernels import native
from sparkjax.kernels.linear import native as op

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.why_not()))

QUANTIZED = ("Q4_0", "Q4_1", "Q8_0")
KINDS = (*QUANTIZED, "float32", "bfloat16")


@jax.tree_util.register_pytree_node_class
class Blocks(SimpleNamespace):
    """Stands for any weight with blocks and a kind."""

    def tree_flatten(self):
        return (self.blocks,), self.kind

    @classmethod
    def tree_unflatten(cls, kind, leaves):
        return cls(blocks=leaves[0], kind=kind)


def weight(kind, *shape, seed=0):
    """(the weight, its numbers as float32)."""
    numbers = np.random.default_rng(seed).standard_normal(shape, np.float32)
    if kind not in QUANTIZED:
        array = jnp.asarray(numbers, kind)
        return array, np.asarray(array, np.float32)
    name = getattr(gguf.GGMLQuantizationType, kind)
    blocks = gguf.quants.quantize(numbers, name)
    return Blocks(blocks=jnp.asarray(blocks), kind=kind), gguf.quants.dequantize(blocks, name)


def inputs(*shape, seed=1):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


linear = jax.jit(op.linear)


def same_bits(a, b):
    np.testing.assert_array_equal(np.asarray(a).view(np.int32), np.asarray(b).view(np.int32))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("m", [1, 3, 7, 40])
@pytest.mark.parametrize(("n", "k"), [(64, 576), (37, 96), (1, 32), (130, 1536)])
def test_equals_decoded_product(kind, m, n, k):
    w, numbers = weight(kind, n, k)
    x = inputs(m, k)
    expected = x.astype(np.float64) @ numbers.T.astype(np.float64)
    np.testing.assert_allclose(linear(x, w), expected, atol=2e-6 * k, rtol=0)


@pytest.mark.parametrize("kind", QUANTIZED)
def test_decodes_exactly(kind):
    """A unit vector picks one column of the decoded weight, bit for bit."""
    w, numbers = weight(kind, 24, 64)
    same_bits(linear(jnp.eye(64), w) + 0.0, numbers.T + 0.0)


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("k", [1, 17, 33, 100])
def test_dense_of_any_width(kind, k):
    w, numbers = weight(kind, 9, k)
    x = inputs(5, k)
    np.testing.assert_allclose(linear(x, w), x @ numbers.T, atol=1e-4)
    same_bits(linear(x, w)[2:3], linear(x[2:3], w))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(54, 576), (30, 160)])
def test_row_is_the_same_in_any_batch(kind, n, k):
    w, _ = weight(kind, n, k)
    x = inputs(33, k)
    alone = np.concatenate([np.asarray(linear(x[i : i + 1], w)) for i in range(33)])
    random = np.random.default_rng(2)
    for m in range(1, 34):
        order = random.permutation(33)[:m]
        same_bits(linear(x[order], w), alone[order])


def test_row_is_the_same_in_a_large_batch():
    w, _ = weight("Q4_1", 48, 1536)
    x = inputs(600, 1536)
    whole = np.asarray(linear(x, w))
    for i in (0, 47, 299, 599):
        same_bits(whole[i : i + 1], linear(x[i : i + 1], w))


@pytest.mark.parametrize("kind", KINDS)
def test_layer_and_rows_are_data(kind):
    w, numbers = weight(kind, 3, 20, 64)
    x = inputs(10, 64)
    for layer in range(3):
        full = linear(x, w, layer)
        np.testing.assert_allclose(full, x @ numbers[layer].T, atol=1e-4)
        for rows in (0, 1, 6, 10):
            part = np.asarray(linear(x, w, jnp.int32(layer), jnp.int32(rows)))
            same_bits(part[:rows], full[:rows])
            assert not part[rows:].any()


def test_group_equals_single_calls():
    names = ["Q4_1", "Q8_0", "bfloat16"]
    weights = [weight(kind, 2, n, 96)[0] for kind, n in zip(names, (64, 5, 33), strict=True)]
    x = inputs(2, 3, 96)
    group = jax.jit(op.linear_group)(x, weights, 1)
    for y, w in zip(group, weights, strict=True):
        assert y.shape[:2] == (2, 3)
        same_bits(y, linear(x, w, 1))


def test_scan_over_layers_copies_no_weight():
    w, numbers = weight("Q4_1", 6, 256, 256)

    @jax.jit
    def chain(x, w):
        return jax.lax.scan(lambda y, i: (op.linear(y, w, i), None), x, jnp.arange(6))[0]

    x = inputs(2, 256) * 0.1
    expected = x
    for layer in range(6):
        expected = expected @ numbers[layer].T
    result = chain(x, w)
    np.testing.assert_allclose(result, expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())
    memory = chain.lower(x, w).compile().memory_analysis()
    assert memory.temp_size_in_bytes < w.blocks.nbytes // 6


@pytest.mark.parametrize("kind", KINDS)
def test_embed_equals_decoded_rows(kind):
    w, numbers = weight(kind, 50, 96)
    ids = np.random.default_rng(3).integers(0, 50, (3, 70)).astype(np.int32)
    # By value: with AVX2, a zero weight of a negative scale is +0.
    np.testing.assert_array_equal(jax.jit(op.embed)(ids, w), numbers[ids])
    np.testing.assert_array_equal(op.embed(jnp.array([-4, 99], jnp.int32), w), numbers[[0, 49]])


def test_refusals():
    w, _ = weight("Q4_1", 4, 64)
    assert op.supports(inputs(1, 64), w) is None
    assert "bfloat16" in op.supports(jnp.zeros((1, 64), jnp.bfloat16), w)
    assert "Q6_K" in op.supports(inputs(1, 64), Blocks(blocks=w.blocks, kind="Q6_K"))
    with pytest.raises(ValueError, match="columns"):
        op.linear(inputs(1, 32), w)
    with pytest.raises(ValueError, match="layer"):
        op.linear(inputs(1, 64), weight("Q4_1", 2, 4, 64)[0])
