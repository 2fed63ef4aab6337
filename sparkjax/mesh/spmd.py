"""One program on every rank: meshes, shardings, and the shard_map door."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .context import RANKS


def make_mesh(ranks: int, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of `ranks` devices on the axis `RANKS` (the first devices of the process's list)."""
    devices = list(jax.devices() if devices is None else devices)
    if len(devices) < ranks:
        raise ValueError(f"mesh.tensor_parallel is {ranks}, but there are {len(devices)} devices")
    return Mesh(np.array(devices[:ranks]), (RANKS,))


def spmd(function: Callable, mesh: Mesh | None, in_specs: Any, out_specs: Any) -> Callable:
    """`function` run on every rank over its own shares; without a mesh, `function` itself."""
    if mesh is None:
        return function
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def shardings(mesh: Mesh | None, specs: Any) -> Any:
    """NamedShardings of a tree of PartitionSpecs; without a mesh, the default device."""
    if mesh is None:
        one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        return jax.tree.map(lambda _: one, specs, is_leaf=lambda s: isinstance(s, PartitionSpec))
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs,
        is_leaf=lambda s: isinstance(s, PartitionSpec),
    )
