"""What manifests say publishers write is what detection reads."""

from __future__ import annotations

import numpy as np
import pytest

from sparkjax.weights import formats
from sparkjax.weights.detect import detect
from sparkjax.weights.published import LAYOUTS, written


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_is_detected_as_one_weight_of_its_shape(layout: str):
    n, k = 256, 384
    tensors = written(layout, "a.b.weight", n, k)
    found = detect(tensors)
    assert list(found) == ["a.b.weight"] and set(found["a.b.weight"].tensors) == set(tensors)

    def read(name: str) -> np.ndarray:
        dtype, shape = tensors[name]
        return np.array([n, k]) if name.endswith("_shape") else np.ones(shape, dtype)

    node = found["a.b.weight"].build(read)
    assert formats.logical_shape(node) == (n, k)


def test_an_unknown_layout_names_those_there_are():
    with pytest.raises(ValueError, match=r"fp9.*none of fp8-block"):
        written("fp9", "a.weight", 8, 8)
