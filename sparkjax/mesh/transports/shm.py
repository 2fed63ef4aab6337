"""`shm`: collectives between processes of one host through POSIX shared memory.

Each process computes on its own device in programs of its own; the collectives are XLA FFI calls in
them. The calls of one program must depend on one another (`order.py` checks a compiled program).
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
from typing import ClassVar

import jax

from . import TransportError
from .build import load
from .calls import Calls

SLOT_BYTES = 1 << 20
"""Payload of one exchange; larger arrays go in several."""
TARGET = "sparkjax_shm"
HEADERS = tuple(f"{n}.h" for n in ("calls", "device", "handler", "rounds", "segment", "sums", "world"))


@functools.cache
def _native(platform: str) -> ctypes.CDLL:
    """The library of "cpu" or "cuda". Raises TransportError."""
    native = load("shm", "shm", HEADERS, platform)
    native.sparkjax_shm_open.argtypes = [
        ctypes.c_char_p, ctypes.c_int, ctypes.c_int, ctypes.c_uint64, ctypes.c_double,
        ctypes.c_double, ctypes.c_int, ctypes.c_uint32, ctypes.c_char_p, ctypes.c_uint64,
    ]  # fmt: skip
    native.sparkjax_shm_abort.argtypes = [ctypes.c_int, ctypes.c_char_p]
    native.sparkjax_shm_why.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_uint64]
    return native


@dataclasses.dataclass(frozen=True)
class Shm(Calls):
    """One rank's end of a world; see `Transport` for its methods."""

    PREFIX: ClassVar[str] = TARGET

    @classmethod
    def open(
        cls,
        name: str,
        rank: int,
        ranks: int,
        *,
        timeout: float = 30.0,
        join: float = 60.0,
        slot_bytes: int = SLOT_BYTES,
        epoch: int = 2,
        platform: str = "cpu",
    ) -> Shm:
        """Joins the world `name`; returns once all ranks have.

        Args:
          name: of the shared memory, new for every world.
          timeout: seconds that a collective waits for another rank.
          join: seconds to wait here.
          slot_bytes: payload of one exchange, a multiple of 64 for each rank.
          epoch: the first exchange's number (tests begin in front of its wrap).
          platform: "cpu" or "cuda", where the programs run.

        Raises:
          TransportError: not all came, no memory, no compiler.
        """
        message = ctypes.create_string_buffer(512)
        # Whoever has a core to itself may poll; where ranks share cores that only delays the others.
        spins = 20_000 if (os.cpu_count() or 1) > ranks else 50
        native = _native(platform)
        if platform == "cuda":
            native.sparkjax_shm_device(jax.local_devices()[0].local_hardware_id)
        handle = native.sparkjax_shm_open(
            f"/{name}".encode(), rank, ranks, slot_bytes, timeout, join, spins,
            epoch & 0xFFFFFFFF, message, len(message),
        )  # fmt: skip
        if handle < 0:
            raise TransportError(f"shm: rank {rank}: {message.value.decode(errors='replace')}")
        return cls(rank, ranks, handle, platform)

    @property
    def direct(self) -> bool:
        """Whether the ranks' GPUs read one another's memory; if not, they meet in the host's."""
        return bool(self._library().sparkjax_shm_direct(self.handle))

    def _library(self) -> ctypes.CDLL:
        return _native(self.platform)
