"""The fabric's protocol over a network that delivers whenever and in whatever order it may."""

from __future__ import annotations

import threading

import ml_dtypes
import numpy as np
import pytest
from fabric_support import call, every_collective, expected, together, world

from sparkjax.mesh.transports import calls
from sparkjax.mesh.transports.fabric import native

SIZES = (0, 1, 2, 17, 1000, 4097, 20_001, 70_001)
DTYPES = (np.float32, ml_dtypes.bfloat16, np.int32, np.uint8)


def arrays(seed: int, count: int, size: int, dtype) -> list[np.ndarray]:
    """`count` arrays, wide in exponent, so that the order of a sum shows in its bits."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count, size)) * 10.0 ** rng.integers(-3, 4, (count, size))
    return list(x.astype(np.float32).astype(dtype))


@pytest.mark.parametrize(
    "ranks, shape, rails",
    [(2, "direct", 1), (2, "direct", 2), (3, "ring", 2), (4, "ring", 1), (4, "ring", 2),
     (6, "direct", 2)],
)  # fmt: skip
def test_every_collective_of_any_size_gives_numpys_bits(ranks: int, shape: str, rails: int):
    with world(ranks, shape, rails, seed=ranks) as handles:
        for at, size in enumerate(SIZES):
            dtype = DTYPES[at % len(DTYPES)] if size != 70_001 else np.float32
            brought = arrays(at, ranks, size, dtype)
            parts = np.stack(arrays(100 + at, ranks * ranks, size, dtype))
            parts = parts.reshape(ranks, ranks, size)

            def work(rank: int, handle: int, brought=brought, parts=parts) -> list:
                return every_collective(rank, handle, brought, parts)

            results, errors = together(handles, work)
            assert errors == [""] * ranks
            for rank, got in enumerate(results):
                for mine, wanted in zip(got, expected(rank, brought, parts), strict=True):
                    assert mine.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("shape, ranks", [("direct", 2), ("ring", 4)])
def test_a_thousand_rounds_across_the_wrap_of_epochs(window: int, shape: str, ranks: int):
    """Random sizes, from none of the slots to several; a slot that is used too early shows."""
    sizes = np.random.default_rng(window).integers(1, 700, 1000 if ranks == 2 else 250)
    with world(ranks, shape, window=window, slot_bytes=1 << 10, epoch=-300, seed=window) as handles:

        def work(rank: int, handle: int) -> None:
            for at, size in enumerate(sizes):
                base = np.arange(size, dtype=np.float32) + at
                total = call(handle, calls.ALL_REDUCE, base * (rank + 1))
                np.testing.assert_array_equal(total, base * (ranks * (ranks + 1) // 2))

        assert together(handles, work)[1] == [""] * ranks


def test_a_paced_sender_sends_the_same():
    with world(3, bytes_a_second=2e8) as handles:
        x = [np.full(200_000, rank, np.float32) for rank in range(3)]
        results, errors = together(handles, lambda r, h: call(h, calls.ALL_REDUCE, x[r]))
        assert errors == [""] * 3
        assert all((y == 3).all() for y in results)


def test_a_late_rank_is_waited_for():
    with world(2) as handles:
        first = threading.Event()

        def work(rank: int, handle: int) -> np.ndarray:
            if rank:
                first.wait(10)
                # Rank 0 has posted by now, and maybe a long time ago.
            x = np.ones(3, np.float32)
            if not rank:
                first.set()
            return call(handle, calls.ALL_REDUCE, x)

        results, errors = together(handles, work)
        assert errors == ["", ""] and all((y == 2).all() for y in results)


def test_a_rank_that_does_not_come_is_named_on_all():
    with world(3, seconds=0.3) as handles:
        x = np.ones(3, np.float32)
        together(handles, lambda r, h: call(h, calls.BARRIER, x))
        _, errors = together(handles, lambda r, h: r == 2 or call(h, calls.ALL_REDUCE, x))
        assert "all_reduce number 1 of rank" in errors[0]
        assert "(12 bytes): rank 2 did not come in 0." in errors[0]
        # Told over the network: the late one ends at its next call, with the same reason.
        _, late = together(handles[2:], lambda r, h: call(h, calls.ALL_REDUCE, x))
        assert "rank 2 did not come in 0." in late[0]


def test_calls_that_differ_are_named():
    with world(2, seconds=10) as handles:
        x = np.ones(4, np.float32)

        def work(rank: int, handle: int) -> None:
            call(handle, calls.ALL_GATHER if rank else calls.ALL_REDUCE, x, (2, 4))

        _, errors = together(handles, work)
        assert all("in all_reduce number 0 of 16 bytes" in e for e in errors), errors
        assert all("in all_gather number 0 of 16 bytes" in e for e in errors), errors


def test_a_link_that_breaks_is_named_with_its_rail():
    with world(2, seconds=10) as handles:
        native.load("cpu").sparkjax_fabric_cut(handles[0], 1)
        x = np.ones(100_000, np.float32)
        _, errors = together(handles, lambda r, h: call(h, calls.ALL_REDUCE, x))
        assert errors[0] == errors[1]
        assert "rank 0: a write to rank 1 on rail 1 (device1) failed: the link was cut" in errors[0]


def test_an_abort_ends_the_waits_of_all_ranks():
    """In a ring of four the reason is passed on to the rank opposite."""
    with world(4, "ring", seconds=30) as handles:
        x = np.ones(3, np.float32)

        def work(rank: int, handle: int) -> None:
            if rank == 3:
                native.load("cpu").sparkjax_fabric_abort(handle, b"rank 3 has had enough")
            else:
                call(handle, calls.ALL_REDUCE, x)

        _, errors = together(handles, work)
        assert errors[:3] == ["fabric: rank 3 has had enough"] * 3


def test_each_rail_alone():
    """As at boot: every rail is measured, then all together."""
    with world(4, "ring", rails=2) as handles:
        library = native.load("cpu")
        x = np.ones(50_000, np.float32)

        def work(rank: int, handle: int) -> None:
            for rail in (0, 1, -1):
                library.sparkjax_fabric_only(handle, rail)
                call(handle, calls.BARRIER, x[:1])
                for _ in range(5):
                    assert (call(handle, calls.ALL_REDUCE, x) == 4).all()

        assert together(handles, work)[1] == [""] * 4
