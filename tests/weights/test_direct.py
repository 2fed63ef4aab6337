"""Direct reads without a copy, at every place that bytes may have in their pages."""


import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkjax.weights import direct
from sparkjax.weights.errors import CheckpointError

SIZE = 3 << 20


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A file of random bytes, and its map."""
    path = tmp_path_factory.mktemp("direct") / "bytes"
    path.write_bytes(np.random.default_rng(0).bytes(SIZE))
    return path, np.memmap(path, np.uint8, "r")


@settings(max_examples=60, deadline=None)
@given(begin=st.integers(0, 2 * direct.PAGE), cut=st.integers(0, 2 * direct.PAGE), data=st.data())
def test_bytes_arrive_where_they_belong(file, begin, cut, data):
    path, mapped = file
    view = mapped[begin : SIZE - cut]
    shift = data.draw(st.sampled_from([begin % direct.PAGE, 0, 8]))
    room = direct.pages(shift + view.nbytes + direct.PAGE)
    room[:] = 7
    target = room[shift : shift + view.nbytes]
    told = []
    with direct.Reader([(path, mapped)], advance=told.append) as reader:
        reader.fill([(target, view)])
    assert np.array_equal(target, view) and sum(told) == view.nbytes
    assert (room[:shift] == 7).all() and (room[shift + view.nbytes :] == 7).all()


def test_a_file_that_ends_early_is_named(tmp_path):
    path = tmp_path / "short"
    path.write_bytes(b"x" * SIZE)
    mapped = np.memmap(path, np.uint8, "r")
    target = direct.empty((SIZE,), np.uint8)
    with path.open("r+b") as f:
        f.truncate(SIZE // 2)
    with direct.Reader([(path, mapped)]) as reader, pytest.raises(CheckpointError, match="short: ends"):
        reader.fill([(target, mapped)])
