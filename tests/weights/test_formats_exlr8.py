"""EXLR8's halves of several bit rates make one matrix, in either direction."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparkjax.mesh.units import take
from sparkjax.weights import formats
from sparkjax.weights.errors import CheckpointError
from sparkjax.weights.formats import COLS, ROWS
from sparkjax.weights.formats.exlr8 import Halves, exlr8_half

WIDE = 256
run = jax.jit(formats.dequantize)


def half(rng: np.random.Generator, bits: int, part: str):
    raw = rng.integers(0, 256, 32 * bits * (WIDE // 16) * 8, dtype=np.uint8)
    chan, block = rng.random(128).astype(np.float16), rng.random(2).astype(np.float16)
    signs = rng.choice(np.array([-1, 1], np.int8), WIDE)
    return exlr8_half(raw, chan, block, signs, part)


def numbers(node) -> np.ndarray:
    return np.asarray(run(jax.tree.map(jnp.asarray, node)))


@pytest.mark.parametrize(("part", "axis"), [("out", ROWS), ("in", COLS)])
def test_halves_are_one_matrix(part, axis):
    rng = np.random.default_rng(2)
    parts = tuple(half(rng, bits, part) for bits in (2, 4, 3))
    node = Halves(parts, axis)
    whole = numbers(node)
    assert node.shape == whole.shape == ((384, WIDE) if part == "out" else (WIDE, 384))
    np.testing.assert_array_equal(whole, np.concatenate([numbers(p) for p in parts], axis))
    for index in (np.arange(100, 300), np.array([300, 5, -1, 130, 131])):
        for side in (ROWS, COLS):
            chosen = index % node.shape[side] if (index >= 0).all() else np.minimum(index, 200)
            picked = formats.pick(node, side, chosen)
            np.testing.assert_allclose(
                numbers(picked), take(whole, side, chosen), rtol=1e-5, atol=1e-5 * np.abs(whole).max()
            )
    stacked = formats.stack([node, node], (2,))
    np.testing.assert_allclose(numbers(stacked)[1], whole, rtol=1e-5, atol=1e-5)


def test_sizes_that_do_not_fit_are_refused():
    rng = np.random.default_rng(0)
    good = {
        "raw": np.zeros(32 * 2 * 16 * 8, np.uint8),
        "chan": np.ones(128, np.float16),
        "block": np.ones(2, np.float16),
        "signs": np.ones(WIDE, np.int8),
        "part": "out",
    }
    assert exlr8_half(**good).shape == (128, WIDE)
    for change in (
        {"part": "up"},
        {"raw": good["raw"][:-3]},
        {"chan": good["chan"][:64]},
        {"block": rng.random(3).astype(np.float16)},
    ):
        with pytest.raises(CheckpointError):
            exlr8_half(**{**good, **change})
