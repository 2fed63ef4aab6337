"""The data plane's library: compiled on first use, its functions, its FFI target.

It is loaded with its symbols in front of those of later libraries, since it has to see the queue
pairs that pyverbs makes (verbs.h says why).
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

import numpy as np

from .. import TransportError, build
from ..calls import MESSAGE
from .topology import MOST_PATHS, Layout

TARGET = "sparkjax_fabric"
VERBS = Path("/usr/include/infiniband/verbs.h")
SHARED = ("calls.h", "device.h", "handler.h", "rounds.h", "sums.h")
HEADERS = tuple(
    f"fabric/{name}.h" for name in ("image", "network", "rehearsal", "sender", "topology", "verbs", "world")
)  # fmt: skip


class Shape(ctypes.Structure):
    """As SparkjaxFabricShape in world.h."""

    _fields_ = [
        ("rank", ctypes.c_int32), ("ranks", ctypes.c_int32), ("window", ctypes.c_int32),
        ("spins", ctypes.c_int32), ("slot_bytes", ctypes.c_uint64), ("seconds", ctypes.c_double),
        ("bytes_a_second", ctypes.c_double), ("epoch", ctypes.c_uint32),
        ("links", ctypes.c_int32), ("relays", ctypes.c_int32),
        ("peers", ctypes.POINTER(ctypes.c_int32)), ("rails", ctypes.POINTER(ctypes.c_int32)),
        ("names", ctypes.POINTER(ctypes.c_char_p)), ("paths", ctypes.POINTER(ctypes.c_int32)),
        ("relay", ctypes.POINTER(ctypes.c_int32)),
    ]  # fmt: skip


class End(ctypes.Structure):
    """As End in verbs.h: one end of a connected link."""

    _fields_ = [
        ("queue_pair", ctypes.c_uint64), ("remote", ctypes.c_uint64),
        ("local_key", ctypes.c_uint32), ("remote_key", ctypes.c_uint32),
        ("inline_bytes", ctypes.c_uint32),
    ]  # fmt: skip


def verbs_flags() -> tuple[str, ...]:
    """Flags that compile the verbs in, where libibverbs' headers are."""
    return ("-DSPARKJAX_VERBS=1",) if VERBS.exists() else ()


@functools.cache
def load(platform: str) -> ctypes.CDLL:
    """The library of "cpu" or "cuda". Raises TransportError."""
    flags = verbs_flags()
    opened = os.RTLD_NOW | os.RTLD_GLOBAL
    native = build.load("fabric", "fabric/fabric", (*HEADERS, *SHARED), platform, flags, opened)
    signatures = {
        "open": ([ctypes.POINTER(Shape), ctypes.c_char_p, ctypes.c_uint64], ctypes.c_int),
        "base": ([ctypes.c_int], ctypes.c_uint64),
        "bytes": ([ctypes.c_int], ctypes.c_uint64),
        "rehearse": ([ctypes.c_int, ctypes.c_char_p, ctypes.c_uint64], None),
        "cut": ([ctypes.c_int, ctypes.c_int], None),
        "on_host": (
            [ctypes.c_int, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64,
             ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint64], ctypes.c_int,
        ),
        "only": ([ctypes.c_int, ctypes.c_int], None),
        "start": ([ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint64], None),
        "abort": ([ctypes.c_int, ctypes.c_char_p], None),
        "patience": ([ctypes.c_int, ctypes.c_double], None),
        "why": ([ctypes.c_int, ctypes.c_char_p, ctypes.c_uint64], None),
        "close": ([ctypes.c_int, ctypes.c_double], None),
    }  # fmt: skip
    if flags:
        signatures["connect"] = ([ctypes.c_int, ctypes.POINTER(End), ctypes.c_int], None)
        signatures["queue_pair"] = ([ctypes.c_uint32], ctypes.c_uint64)
    for name, (arguments, result) in signatures.items():
        function = getattr(native, f"{TARGET}_{name}")
        function.argtypes, function.restype = arguments, result
    return native


def open_world(
    native: ctypes.CDLL,
    layout: Layout,
    rank: int,
    ranks: int,
    *,
    names: tuple[str, ...],
    window: int,
    slot_bytes: int,
    seconds: float,
    bytes_a_second: float,
    epoch: int,
) -> int:
    """The handle of a new world, not connected yet.

    Args:
      names: of the devices, a link each.
      window: pieces of an array under way at a time.
      slot_bytes: payload of a piece, a multiple of 64 for each rank.
      seconds: how long a collective waits.
      bytes_a_second: the pace of each link; 0 is as fast as it goes.
      epoch: the number of the first piece.

    Raises:
      TransportError: no memory.
    """

    def numbers(values: list[int]):
        return (ctypes.c_int32 * max(len(values), 1))(*values)

    paths = [
        layout.paths[who][at] if at < len(layout.paths[who]) else -1
        for who in range(ranks)
        for at in range(MOST_PATHS)
    ]
    relays = [n for r in layout.relays for n in (r.origin, r.target, r.path, r.link)]
    # Whoever has a core to itself may poll; where ranks share cores that only delays the others.
    spins = 20_000 if (os.cpu_count() or 1) > 2 else 200
    shape = Shape(
        rank, ranks, window, spins, slot_bytes, seconds, bytes_a_second, epoch & 0xFFFFFFFF,
        len(layout.links), len(layout.relays),
        numbers([link.peer for link in layout.links]),
        numbers([link.rail for link in layout.links]),
        (ctypes.c_char_p * len(names))(*(name.encode() for name in names)),
        numbers(paths), numbers(relays),
    )  # fmt: skip
    message = ctypes.create_string_buffer(MESSAGE)
    handle = native.sparkjax_fabric_open(ctypes.byref(shape), message, len(message))
    if handle < 0:
        raise TransportError(f"fabric: rank {rank}: {message.value.decode(errors='replace')}")
    return handle


def on_host(
    native: ctypes.CDLL, handle: int, kind: int, x: np.ndarray, y: np.ndarray, root: int = 0
) -> None:
    """A collective between host arrays, x to y, before programs run. Raises TransportError."""
    message = ctypes.create_string_buffer(MESSAGE)
    half = x.dtype.name == "bfloat16"
    failed = native.sparkjax_fabric_on_host(
        handle, kind, x.ctypes.data, y.ctypes.data, x.nbytes, root, half, message, len(message)
    )
    if failed:
        raise TransportError(f"fabric: {message.value.decode(errors='replace')}")
