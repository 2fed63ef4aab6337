"""Worlds of the fabric in one process: every rank a thread, over a network that is none."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from sparkjax.mesh.transports import calls
from sparkjax.mesh.transports.fabric import native, topology


@contextlib.contextmanager
def world(
    ranks: int,
    shape: str = "direct",
    rails: int = 2,
    *,
    window: int = 2,
    slot_bytes: int = 1 << 15,
    epoch: int = 0xFFFFFFF0,
    seconds: float = 30.0,
    bytes_a_second: float = 0.0,
    seed: int = 0,
) -> Iterator[list[int]]:
    """Handles of all ranks. Pieces are small and their numbers about to wrap."""
    library = native.load("cpu")
    hall = secrets.token_hex(8).encode()
    handles = []
    for rank in range(ranks):
        layout = topology.layout(shape, rank, ranks, rails)
        names = tuple(f"device{link.port}" for link in layout.links)
        handle = native.open_world(
            library, layout, rank, ranks, names=names, window=window, slot_bytes=slot_bytes,
            seconds=seconds, bytes_a_second=bytes_a_second, epoch=epoch,
        )  # fmt: skip
        library.sparkjax_fabric_rehearse(handle, hall, seed)
        handles.append(handle)
    try:
        yield handles
    finally:
        for handle in handles:
            library.sparkjax_fabric_close(handle, 0.0)


def together(handles: list[int], work: Callable[[int, int], Any]) -> tuple[list[Any], list[str]]:
    """What work(rank, handle) returned on every rank, and what it raised ("" if nothing)."""
    results, errors = [None] * len(handles), [""] * len(handles)

    def one(rank: int) -> None:
        try:
            results[rank] = work(rank, handles[rank])
        except Exception as error:
            errors[rank] = str(error)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(handles))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results, errors


def call(
    handle: int, kind: int, x: np.ndarray, shape: tuple[int, ...] | None = None, root: int = 0
) -> np.ndarray:
    y = np.empty(x.shape if shape is None else shape, x.dtype)
    native.on_host(native.load("cpu"), handle, kind, x, y, root)
    return y


def every_collective(rank: int, handle: int, brought: list[np.ndarray], parts: np.ndarray) -> list:
    """brought[r] is rank r's array; parts[from, to] that of an all_to_all."""
    ranks, mine = len(brought), brought[rank]
    reduced = []
    if mine.dtype.name in ("float32", "bfloat16"):
        reduced = [call(handle, calls.ALL_REDUCE, mine)]
    return [
        *reduced,
        call(handle, calls.ALL_GATHER, mine, (ranks, *mine.shape)),
        call(handle, calls.ALL_TO_ALL, parts[rank], parts[rank].shape),
        call(handle, calls.BROADCAST, mine, root=ranks - 1),
        call(handle, calls.BARRIER, mine),
    ]


def expected(rank: int, brought: list[np.ndarray], parts: np.ndarray) -> list:
    """What numpy makes of `every_collective`."""
    reduced = []
    if brought[0].dtype.name in ("float32", "bfloat16"):
        total = brought[0].astype(np.float32)
        for term in brought[1:]:
            total = total + term.astype(np.float32)
        reduced = [total.astype(brought[0].dtype)]
    return [*reduced, np.stack(brought), parts[:, rank], brought[-1], brought[rank]]
