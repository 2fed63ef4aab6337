"""One program on every rank: meshes, shardings, and the shard_map door."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .context import RANKS, Context


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
        one = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        return jax.tree.map(lambda _: one, specs, is_leaf=lambda s: isinstance(s, PartitionSpec))
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs,
        is_leaf=lambda s: isinstance(s, PartitionSpec),
    )


def share(spec: PartitionSpec, shape: Sequence[int], rank: int, ranks: int) -> tuple[slice, ...]:
    """Which part of an array of `shape` one rank holds under `spec`, as one slice an axis."""
    names = (*spec, *(None,) * (len(shape) - len(spec)))
    found = []
    for name, size in zip(names, shape, strict=True):
        if name is None:
            found.append(slice(0, size))
            continue
        if size % ranks:
            raise ValueError(f"an axis of {size} does not divide over {ranks} ranks")
        found.append(slice(rank * (size // ranks), (rank + 1) * (size // ranks)))
    return tuple(found)


def whole(spec: PartitionSpec, shape: Sequence[int], ranks: int) -> tuple[int, ...]:
    """The shape of all ranks' arrays together, where one rank holds `shape` under `spec`."""
    names = (*spec, *(None,) * (len(shape) - len(spec)))
    return tuple(n if name is None else n * ranks for name, n in zip(names, shape, strict=True))


def share_of(array: Any, spec: PartitionSpec, rank: int, ranks: int) -> Any:
    """One rank's part of a whole array (or of every plane of a quantized one)."""
    return jax.tree.map(lambda a: a[share(spec, a.shape, rank, ranks)], array)


def local(shapes: Any, specs: Any, context: Context) -> Any:
    """The shapes of what this process allocates: those of one rank's shares where every rank has
    programs of its own, else the whole arrays'."""
    if not context.own:
        return shapes

    def one(whole: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        parts = share(spec, whole.shape, 0, context.ranks)
        return jax.ShapeDtypeStruct(tuple(p.stop - p.start for p in parts), whole.dtype)

    return jax.tree.map(one, shapes, specs)
