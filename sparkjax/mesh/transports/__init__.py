"""What carries a collective from rank to rank, behind one interface."""

from __future__ import annotations

from typing import Protocol

import jax


class TransportError(RuntimeError):
    """A transport cannot be opened, or a collective failed; names rank and collective."""


class Transport(Protocol):
    """Collectives that are calls inside a program of this process alone.

    Hashable: it is a static part of a model's context. Called while a program is traced. Every
    rank makes the same calls in the same order; calls of one program must depend on one another.
    (`xla` needs no such object: its collectives run over a mesh axis inside `shard_map`.)
    """

    @property
    def rank(self) -> int: ...

    @property
    def ranks(self) -> int: ...

    def all_reduce(self, x: jax.Array) -> jax.Array:
        """The sum over ranks, in rank order in float32, in x's dtype: equal bits on all ranks."""

    def all_gather(self, x: jax.Array) -> jax.Array:
        """[ranks, *x.shape]: every rank's x, in rank order."""

    def all_to_all(self, x: jax.Array) -> jax.Array:
        """x[ranks, ...] -> y[ranks, ...] where y[r] is what rank r holds at x[this rank]."""

    def broadcast(self, x: jax.Array, root: int = 0) -> jax.Array:
        """Rank `root`'s x."""

    def barrier(self, after: jax.Array) -> jax.Array:
        """`after`, once every rank has come here."""

    def abort(self, reason: str) -> None:
        """Ends all waits on all ranks; the first reason is the one they report."""

    def patience(self, seconds: float) -> None:
        """How long a collective waits for another rank from now on."""

    @property
    def failure(self) -> str:
        """Why a collective failed, or ""."""

    def close(self) -> None:
        """Leaves the world; no program may call it any more."""
