"""What a model's forward pass may know of where it runs: the mesh axis and the kernel choice."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

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
    """

    dtype: str = "float32"
    ranks: int = 1
    platform: str = ""
    kernels: tuple[tuple[str, str], ...] = ()

    def kernel(self, operation: str) -> str | None:
        return dict(self.kernels).get(operation)

    def all_reduce(self, x: jax.Array) -> jax.Array:
        """Sum over ranks in rank order in float32: every rank holds the same bits."""
        if self.ranks == 1:
            return x
        terms = jax.lax.all_gather(x.astype(jnp.float32), RANKS)
        total = terms[0]
        for rank in range(1, self.ranks):
            total = total + terms[rank]
        return total.astype(x.dtype)

    def all_gather(self, x: jax.Array, axis: int = -1) -> jax.Array:
        """The ranks' shares joined along `axis`, in rank order."""
        if self.ranks == 1:
            return x
        return jax.lax.all_gather(x, RANKS, axis=axis % x.ndim, tiled=True)

    def rank(self) -> jax.Array | int:
        return 0 if self.ranks == 1 else jax.lax.axis_index(RANKS)
