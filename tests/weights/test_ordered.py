"""Inputs sorted by group are the same weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparkjax.weights.formats import COLS, ROWS, bits, gptq, packed
from sparkjax.weights.formats.ordered import Ordered, in_order

N, K, GROUP = 24, 64, 16


def made(kind: str, groups: np.ndarray):
    rng = np.random.default_rng(3)

    def words(*shape: int) -> np.ndarray:
        return rng.integers(-(2**31), 2**31, shape).astype(np.int32)

    count = int(groups.max()) + 1
    scale = rng.uniform(0.5, 2, (count, N)).astype(np.float16)
    if kind == "packed":
        zero = words(bits.words(N, 4), count)
        return packed.packed_tensor(words(N, K // 8), scale.T, K, zero, groups)
    width = int(kind)
    across = words(count, bits.words(N, width))
    return gptq.gptq_tensor(
        words(bits.words(K, width), N), across, scale, groups, minus_one=True, width=width
    )


def numbers(node) -> np.ndarray:
    return np.asarray(jax.tree.map(jnp.asarray, node).dequantize())


@pytest.mark.parametrize("kind", ["4", "3", "packed"])
def test_sorting_keeps_every_number(kind):
    groups = np.random.default_rng(1).permutation(np.arange(K) // GROUP)
    node = made(kind, groups)
    found = in_order(node)
    assert isinstance(found, Ordered) and found.shape == (N, K)
    assert found.inner.group == GROUP and found.inner.groups is None
    np.testing.assert_array_equal(numbers(found), numbers(node))
    ids = jnp.array([3, 0, 23])
    rows = jax.tree.map(jnp.asarray, found).take_rows(ids)
    np.testing.assert_array_equal(rows, numbers(node)[np.asarray(ids)])
    index = np.array([5, -1, 8, 40])
    for axis in (ROWS, COLS):
        part = index % node.shape[axis] if axis == ROWS else index
        np.testing.assert_array_equal(
            numbers(found.pick(axis, part)), numbers(node.pick(axis, part))
        )


def test_groups_of_different_sizes_stay():
    groups = np.arange(K) // GROUP
    groups[0] = 1
    node = made("4", groups)
    assert in_order(node) is node
