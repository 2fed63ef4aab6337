"""Layers in scans equal layers one by one, and few bodies are compiled."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkjax.models.layers.stack import Layer, lone, run_layers, runs, segments

PATTERNS = st.tuples(st.lists(st.sampled_from("ABC"), min_size=1, max_size=6), st.integers(1, 25)).map(
    lambda drawn: tuple((drawn[0] * drawn[1])[: drawn[1]])
)


@settings(max_examples=25, deadline=None)
@given(st.one_of(PATTERNS, st.lists(st.sampled_from("ABC"), min_size=1, max_size=20).map(tuple)))
def test_scans_equal_a_loop(kinds: tuple[str, ...]):
    weights = {k: jnp.arange(1.0, 40.0) * ord(k) for k in "ABC"}
    stacks = {k: [i for i, kind in enumerate(kinds) if kind == k] for k in "ABC"}

    def block(x: Any, layer: Layer) -> Any:
        w = weights[layer.kind][layer.within(stacks[layer.kind])]
        x = 0.9 * x + w + layer.index
        return x, {"all": x} | ({"some": w} if layer.kind == "C" else {})

    last, captured = run_layers(kinds, block, jnp.float32(1))
    x, every, some = np.float32(1), [], []
    for index, kind in enumerate(kinds):
        w = float(weights[kind][stacks[kind].index(index)])
        x = np.float32(0.9 * x + w + index)
        every.append(x)
        some += [w] if kind == "C" else []
    assert np.allclose(last, x, rtol=1e-5)
    assert np.allclose(captured["all"], every, rtol=1e-5)
    assert np.allclose(captured.get("some", []), some)


def bodies(kinds: tuple[str, ...]) -> int:
    return sum(len(runs(kinds[s.start : s.start + s.period])) for s in segments(kinds))


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (("S",) * 48, 1),
        (("S", "S", "S", "S", "S", "F") * 8, 2),
        (("D", *(("S", "S", "S", "S", "F") + ("S", "S", "S", "S", "S", "F") * 7)), 5),
        (("D", "D", *("S", "S", "S", "F") * 11, "S", "S", "F"), 5),
    ],
)
def test_bodies_do_not_grow_with_depth(kinds: tuple[str, ...], expected: int):
    assert bodies(kinds) == expected


def test_a_stack_must_hold_all_or_none_of_a_run():
    def block(x: Any, layer: Layer) -> Any:
        return x + layer.within((0, 2)), {}

    with pytest.raises(ValueError, match="only some"):
        run_layers(("A", "A", "A"), block, jnp.int32(0))
    assert lone("A", 7).within((7, 8)) == 0
