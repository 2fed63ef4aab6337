"""Which GPU a rank computes on, where ranks are processes of one host.

Each gets one of its own while there are enough; else they share in turns, with equal parts of the
memory.
"""

from __future__ import annotations

import contextlib
import ctypes

SHARE = 0.75
"""How much of a GPU's memory all its ranks take together: what JAX takes by itself."""


def count() -> int:
    """GPUs of this host, asked of the driver without opening one."""
    found = ctypes.c_uint(0)
    with contextlib.suppress(OSError):
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() == 0:
            nvml.nvmlDeviceGetCount_v2(ctypes.byref(found))
    return found.value


def place(rank: int, ranks: int, gpus: int) -> tuple[int, float]:
    """(which of `gpus` rank `rank` of `ranks` computes on, the part of its memory that is its own)."""
    mine = rank % gpus
    return mine, SHARE / len(range(mine, ranks, gpus))
