"""What a model's forward pass may know of where it runs: the mesh axis and the kernel choice."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from .transports import Transport

RANKS = "ranks"
"""The mesh axis over which weights are sharded (tensor parallelism)."""


@dataclasses.dataclass(frozen=True)
class Context:
    """Static (hashable) surroundings of a forward pass.

    Attributes:
      dtype: the compute dtype's name, "float32" or "bfloat16".
      ranks: how many ranks share each layer. Above 1 the forward pass runs inside `shard_map`
        over the mesh axis `RANKS` and sees its own share of weights and caches.
      platform: where the program will run, "cpu" or "cuda"; kernels are chosen for it. Empty means
        the reference implementations only, which run and differentiate everywhere.
      kernels: (operation, implementation) pairs; an operation that is not named takes the fastest
        implementation that runs on the platform.
      transport: what carries collectives where every rank is a process with programs of its own;
        None is XLA's own collectives over the mesh axis.
    """

    dtype: str = "float32"
    ranks: int = 1
    platform: str = ""
    kernels: tuple[tuple[str, str], ...] = ()
    transport: Transport | None = None

    def kernel(self, operation: str) -> str | None:
        return dict(self.kernels).get(operation)

    def all_reduce(self, x: jax.Array) -> jax.Array:
        """Sum over ranks in rank order in float32: every rank holds the same bits."""
        if self.ranks == 1:
            return x
        if self.transport is not None:
            return self.transport.all_reduce(x)
        terms = jax.lax.all_gather(x.astype(jnp.float32), RANKS)
        total = terms[0]
        for rank in range(1, self.ranks):
            total = total + terms[rank]
        return total.astype(x.dtype)

    def all_gather(self, x: jax.Array, axis: int = -1) -> jax.Array:
        """The ranks' shares joined along `axis`, in rank order."""
        if self.ranks == 1:
            return x
        axis %= x.ndim
        if self.transport is None:
            return jax.lax.all_gather(x, RANKS, axis=axis, tiled=True)
        parts = jnp.moveaxis(self.transport.all_gather(x), 0, axis)
        return parts.reshape(*x.shape[:axis], self.ranks * x.shape[axis], *x.shape[axis + 1 :])

    def all_to_all(self, x: jax.Array) -> jax.Array:
        """x[ranks, ...] -> y[ranks, ...], where y[r] is what rank r holds at x[this rank]."""
        if self.ranks == 1:
            return x
        if self.transport is not None:
            return self.transport.all_to_all(x)
        return jax.lax.all_to_all(x, RANKS, split_axis=0, concat_axis=0, tiled=True)

    def broadcast(self, x: jax.Array, root: int = 0) -> jax.Array:
        """Rank `root`'s x."""
        if self.ranks == 1:
            return x
        if self.transport is not None:
            return self.transport.broadcast(x, root)
        return jax.lax.all_gather(x, RANKS)[root]

    def rank(self) -> jax.Array | int:
        """This rank: a number where each process has programs of its own, else a traced one."""
        if self.transport is not None:
            return self.transport.rank
        return 0 if self.ranks == 1 else jax.lax.axis_index(RANKS)

    @property
    def own(self) -> bool:
        """Whether this process's arrays are one rank's shares, and its programs this rank's."""
        return self.transport is not None
