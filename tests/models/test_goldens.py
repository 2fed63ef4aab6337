"""Every family against the golden outputs of its reference, prediction layers too."""

from __future__ import annotations

import pytest
from driver import FAMILIES, GOLDEN, over

from sparkjax.verify import verify


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_golden(family: str):
    assert not [line for line in verify(GOLDEN / family).lines if line.ok is False]


@over(("mimo_v2_flash",), 16, 1, 7, 64)
def test_equals_the_golden_in_tiles(family: str, value: int):
    report = verify(GOLDEN / family, tiles=value)
    assert not [line for line in report.lines if line.ok is False]
