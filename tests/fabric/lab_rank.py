"""One rank on a lab host: python lab_rank.py HOST RAILS. It prints a line of JSON for every mode."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np

from sparkjax.mesh.transports import TransportError, calls
from sparkjax.mesh.transports.fabric import native
from sparkjax.mesh.transports.fabric.transport import Fabric, Settings
from sparkjax.mesh.world.roster import Address
from sparkjax.mesh.world.world import World, WorldError

jax.config.update("jax_platforms", "cpu")
RANKS = 2
HOSTS = ("10.77.0.1", "10.77.0.2")
DEVICES = ("rxe0", "rxe1")
SIZES = (2, 3, 17, 1000, 4097, 16_385, 70_001, 1 << 20)
"""Elements of arrays: of float32 from 8 bytes to 4 MiB."""
MOST_ELEMENTS = 1 << 20
"""From here on float32 alone: an emulated network carries a megabyte a second."""
DTYPES = ("float32", "bfloat16", "int32", "uint8")


def payload(seed: int, rank: int, count: int, dtype: str) -> np.ndarray:
    """What a rank brings: wide in exponent, so that the order of a sum shows in its bits."""
    rng = np.random.default_rng([seed, rank])
    x = rng.standard_normal(count) * 10.0 ** rng.integers(-3, 4, count)
    return np.asarray(x, np.float32).astype(jnp.dtype(dtype)) if "float" in dtype else (
        rng.integers(0, 100, count).astype(dtype)
    )  # fmt: skip


def ordered_sum(terms: list[np.ndarray]) -> np.ndarray:
    total = terms[0].astype(np.float32)
    for term in terms[1:]:
        total = total + term.astype(np.float32)
    return total.astype(terms[0].dtype)


class Rank:
    """A world of two over the fabric, and collectives between host arrays."""

    def __init__(self, rank: int, rails: int, port: int, **fabric):
        self.rank = rank
        addresses = [Address(host, port) for host in HOSTS]
        self.world = World.form(addresses, rank, b"a secret of the lab", join=120, silence=60)
        settings = Settings(rails=rails, devices=DEVICES[:rails])
        self.fabric = Fabric.open(
            self.world.gather, rank, RANKS, HOSTS[rank], settings, **{"timeout": 60.0, **fabric}
        )
        self.world.on_failure = self.fabric.abort
        self.native = native.load("cpu")

    def call(self, kind: int, x: np.ndarray, shape: tuple[int, ...], root: int = 0) -> np.ndarray:
        y = np.empty(shape, x.dtype)
        native.on_host(self.native, self.fabric.handle, kind, x, y, root)
        return y

    def close(self) -> None:
        """In order where the world still stands, else at once."""
        with contextlib.suppress(WorldError):
            self.world.exchange("done")
        self.fabric.close()
        if self.rank == 0:
            self.world.finish()
        time.sleep(0.5)
        self.world.close()


def same(what: str, got: np.ndarray, wanted: np.ndarray) -> None:
    if got.tobytes() != wanted.tobytes():
        raise AssertionError(f"{what}: other bits than numpy's")


def numbers(r: Rank) -> dict:
    """Every collective, size and dtype against numpy; the same inside compiled programs."""
    count = 0
    for seed, size in enumerate(SIZES):
        for dtype in DTYPES if size < MOST_ELEMENTS else DTYPES[:1]:
            all_of = [payload(seed, rank, size, dtype) for rank in range(RANKS)]
            mine, what = all_of[r.rank], f"{size} of {dtype}"
            if "float" in dtype:
                same(f"reduce {what}", r.call(calls.ALL_REDUCE, mine, (size,)), ordered_sum(all_of))
            same(f"gather {what}", r.call(calls.ALL_GATHER, mine, (RANKS, size)), np.stack(all_of))
            same(f"broadcast {what}", r.call(calls.BROADCAST, mine, (size,), 1), all_of[1])
            parts = [payload(seed, 10 * r.rank + to, size, dtype) for to in range(RANKS)]
            theirs = [payload(seed, 10 * of + r.rank, size, dtype) for of in range(RANKS)]
            got = r.call(calls.ALL_TO_ALL, np.stack(parts), (RANKS, size))
            same(f"exchange {what}", got, np.stack(theirs))
            same(f"barrier {what}", r.call(calls.BARRIER, mine, (size,)), mine)
            count += 5 if "float" in dtype else 4
        print(f"arrays of {size}", flush=True)

    def program(x):
        x = r.fabric.all_reduce(x)
        x, _ = jax.lax.scan(lambda x, _: (r.fabric.all_reduce(x * 0.4) + 0.01, None), x, None, 50)
        return r.fabric.all_gather(r.fabric.barrier(x))

    x = [payload(99, rank, 257, "float32") for rank in range(RANKS)]
    got = np.asarray(jax.jit(program)(x[r.rank]))
    total = ordered_sum(x)
    for _ in range(50):
        total = ordered_sum([total * np.float32(0.4)] * RANKS) + np.float32(0.01)
    same("a compiled loop", got, np.stack([total] * RANKS))
    print(f"{count} calls, and a compiled loop", flush=True)
    # A thousand reductions of changing sizes, across the wrap of epochs.
    for at in range(1000):
        size = 1 + at * 37 % 3000
        all_of = [payload(at, rank, size, "float32") for rank in range(RANKS)]
        same(f"round {at}", r.call(calls.ALL_REDUCE, all_of[r.rank], (size,)), ordered_sum(all_of))
    return {"calls": count, "rounds": 1000}


def late(r: Rank) -> dict:
    """Rank 1 comes five seconds late: nobody minds. Then it does not come at all."""
    x = np.ones(4, np.float32)
    r.world.exchange("late")
    started = time.monotonic()
    if r.rank == 1:
        time.sleep(5)
    same("late", r.call(calls.ALL_REDUCE, x, (4,)), x + x)
    waited = time.monotonic() - started
    r.fabric.patience(2.0)
    said = ""
    if r.rank == 0:
        try:
            r.call(calls.ALL_REDUCE, x, (4,))
        except TransportError as error:
            said = str(error)
    r.world.exchange("it has ended")
    if r.rank == 1:  # told over the network: it ends at its next call
        try:
            r.call(calls.ALL_REDUCE, x, (4,))
        except TransportError as error:
            said = str(error)
    return {"waited": waited, "said": said}


def mixed(r: Rank) -> dict:
    """The ranks make calls of different kinds."""
    try:
        r.call(calls.ALL_GATHER if r.rank else calls.ALL_REDUCE, np.ones(4, np.float32), (2, 4))
    except TransportError as error:
        return {"said": str(error)}
    return {"said": ""}


def broken(r: Rank) -> dict:
    """A queue pair of rank 0 goes into error while both reduce without end."""
    breaker = threading.Timer(2.0, r.fabric.break_link, [0])
    if r.rank == 0:
        breaker.start()
    x = np.ones(100_000, np.float32)
    started = time.monotonic()
    said = ""
    while time.monotonic() - started < 60 and not said:
        try:
            r.call(calls.ALL_REDUCE, x, x.shape)
        except TransportError as error:
            said = str(error)
            if r.rank == 0:
                r.world.fail(r.fabric.failure)
    return {"said": said, "after": time.monotonic() - started}


MODES = (numbers, late, mixed, broken)


def main() -> None:
    rank, rails = int(sys.argv[1]), int(sys.argv[2])
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    for at, mode in enumerate(MODES):
        started = time.monotonic()
        try:
            # Epochs are about to wrap, and the fabric is measured once.
            r = Rank(rank, rails, 29970 + at, slot_bytes=64 << 10, epoch=-256, measured=at == 0)
            found = mode(r)
            r.close()
        except Exception as error:  # the next mode has a world of its own
            logging.exception("%s", mode.__name__)
            found = {"error": f"{type(error).__name__}: {error}"}
        found |= {"mode": mode.__name__, "seconds": time.monotonic() - started}
        print("RESULT", json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
