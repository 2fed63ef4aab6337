"""How fast each rail is when a world starts, and what is slow about it."""

from __future__ import annotations

import ctypes
import dataclasses
import statistics
import time

import numpy as np

from .. import TransportError
from ..calls import ALL_REDUCE, BARRIER
from . import native

SMALL, MEDIUM, LARGE = 8 << 10, 48 << 10, 4 << 20
"""Bytes of the reductions that are timed: two of a decode step, one of a prefill."""
ROUNDS = {SMALL: 20, MEDIUM: 20, LARGE: 3}
"""The same on every rank; the first one is not counted."""
PATIENCE = 60.0
"""Seconds for one round: a rail that needs longer carries nothing."""
UNEVEN = 0.6
"""A rail that carries less than this part of the best one's rate is slow."""
TOGETHER = 1.3
"""Rails together should carry this many times what the best one does."""
GOOD_MTU = 4096


@dataclasses.dataclass(frozen=True)
class Speed:
    """Of one rail, or (rail -1) of all together. Seconds of an all_reduce of SMALL and of MEDIUM
    bytes; bytes a second that each rank sends in one of LARGE."""

    rail: int
    device: str
    small: float
    medium: float
    rate: float

    def __str__(self) -> str:
        name = f"rail {self.rail} ({self.device})" if self.rail >= 0 else "all rails"
        return (
            f"{name}: 8 KiB in {self.small * 1e6:.0f} us, 48 KiB in {self.medium * 1e6:.0f} us, "
            f"4 MiB at {self.rate / 1e9:.3g} GB/s"
        )


def rails(library: ctypes.CDLL, handle: int, names: list[str], ranks: int) -> list[Speed]:
    """Times every rail, and all together where there are several. Every rank makes the same calls.

    Args:
      names: of the devices towards the first peer, a rail each.

    Raises:
      TransportError: a rail carries nothing; names it.
    """
    found = []
    for rail in [*range(len(names)), *([-1] if len(names) > 1 else [])]:
        only = rail if len(names) > 1 else -1
        device = names[rail] if rail >= 0 else ""
        library.sparkjax_fabric_only(handle, only)
        try:
            word = np.zeros(1, np.float32)
            native.on_host(library, handle, BARRIER, word, word.copy())
            times = {size: _time(library, handle, size) for size in ROUNDS}
        except TransportError as error:
            where = f"rail {rail} ({device})" if rail >= 0 else "all rails"
            raise TransportError(f"{error} (while {where} was measured)") from error
        rate = LARGE * (ranks - 1) / times[LARGE]
        found.append(Speed(rail, device, times[SMALL], times[MEDIUM], rate))
    return found


def _time(library: ctypes.CDLL, handle: int, size: int) -> float:
    """Seconds of one all_reduce of `size` bytes, the median."""
    x = np.zeros(size // 4, np.float32)
    y = np.empty_like(x)
    taken = []
    for _ in range(ROUNDS[size]):
        started = time.perf_counter()
        native.on_host(library, handle, ALL_REDUCE, x, y)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:])


def problems(speeds: list[Speed]) -> list[str]:
    """What is slow, a line each."""
    single = [s for s in speeds if s.rail >= 0]
    best = max(single, key=lambda s: s.rate)
    found = [
        f"{s} is slow: {best} (cable, MTU, PCIe lanes?)"
        for s in single
        if s.rate < UNEVEN * best.rate
    ]
    found += [
        f"{s} is no better than one rail: {best} (do both share one PCIe function?)"
        for s in speeds
        if s.rail < 0 and s.rate < TOGETHER * best.rate
    ]
    return found


def slow_mtu(device: str, mine: int, theirs: int) -> str:
    """What is wrong with the RDMA MTU (bytes) of a link's two ends, or ""."""
    if mine != theirs:
        return (
            f"{device} has an RDMA MTU of {mine} bytes and the other end of {theirs}: set the same "
            "MTU on all interfaces"
        )
    return small_mtu(device, mine) if mine < GOOD_MTU else ""


def small_mtu(device: str, mtu: int) -> str:
    """Words for an RDMA MTU below GOOD_MTU."""
    return f"{device} has an RDMA MTU of {mtu} bytes: set the interface's MTU to 9000"
