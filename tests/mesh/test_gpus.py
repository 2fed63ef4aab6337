"""Ranks of one host get GPUs of their own, or equal parts of one."""

from __future__ import annotations

import pytest

from sparkjax.mesh.gpus import SHARE, place


@pytest.mark.parametrize(
    "ranks, gpus, expected",
    [
        (2, 2, [(0, SHARE), (1, SHARE)]),
        (2, 1, [(0, SHARE / 2), (0, SHARE / 2)]),
        (3, 2, [(0, SHARE / 2), (1, SHARE), (0, SHARE / 2)]),
        (2, 8, [(0, SHARE), (1, SHARE)]),
    ],
)
def test_every_rank_has_a_gpu_and_its_part_of_the_memory(ranks, gpus, expected):
    assert [place(rank, ranks, gpus) for rank in range(ranks)] == expected
