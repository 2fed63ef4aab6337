"""Unseen seeds and odd shapes, made by the real libraries when the test runs."""

from __future__ import annotations

import pytest

from sparkjax.weights import vectors


@pytest.mark.parity
@pytest.mark.parametrize("seed", range(1, 6))
def test_vectors_of_unseen_seeds(tmp_path, seed):
    for name in ("torch", "compressed_tensors", "transformers", "gguf"):
        pytest.importorskip(name)
    from make_vectors import build

    count = build(tmp_path, seed)
    lines = list(vectors.judge(tmp_path))
    assert len(lines) == count > 40
    assert [line for line in lines if not line.ok] == []
