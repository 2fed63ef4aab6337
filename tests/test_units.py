"""How channels and heads are laid over ranks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sparkjax.mesh import units


@given(st.integers(1, 20000), st.integers(1, 6))
def test_every_channel_stands_once_and_shares_are_equal(count: int, ranks: int):
    laid = units.channels(count, ranks)
    places = laid.gather()
    assert sorted(p for p in places if p >= 0) == list(range(count))
    assert len(laid.source) % ranks == 0
    assert len(places) < count * 1.0625 + ranks


def test_shares_are_whole_blocks_where_that_costs_little():
    assert units.channels(2048, 4).size == 128  # 4 blocks of 128 each
    assert units.channels(2048, 3).size == 64  # 11 of 64, 3 % of padding
    assert units.channels(2048, 6).size == 32
    assert units.channels(640, 4).size == 32  # 5 of 32 each, none is padding
    assert units.channels(2048, 1).identity and units.channels(100, 3).size == 1
