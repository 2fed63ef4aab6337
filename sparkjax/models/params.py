"""One declaration per parameter: shape, logical axes, dtype, initialiser, checkpoint names.

Sharding, loading, random initialisation, the memory plan and the check for missing or unexpected
tensors are all derived from these declarations.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ..mesh import rules, spmd
from ..mesh.units import Units


@dataclasses.dataclass(frozen=True)
class Dim:
    """One dimension: its logical axis and, when it is spread over ranks, its units.

    `size` is the checkpoint's; the array has `stored` elements (padding included).
    """

    size: int
    axis: str | None = None
    units: Units | None = None

    @property
    def stored(self) -> int:
        return self.size if self.units is None else self.units.elements


def spread(units: Units, axis: str) -> Dim:
    return Dim(units.count * units.size, axis, units)


@dataclasses.dataclass(frozen=True)
class Part:
    """Where else a parameter may stand in a file: rows `ranges` (along the first dimension of the
    layer's or expert's tensor) of a larger tensor, joined in order."""

    name: str
    ranges: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Param:
    """One parameter, stacked over `layers` and then over `experts` where these are given.

    Attributes:
      name: the checkpoint's name; `{layer}` and `{expert}` are filled in.
      dims: the dimensions of one layer's (one expert's) tensor, as stored in the checkpoint;
        matrices are [out, in].
      dtype: "weight" (as stored, or the compute dtype when random), "float32" or "int32".
      init: "normal" (std 1/sqrt(fan in)), "zeros" or "ones".
      also: other spellings: names, or parts of larger tensors.
      optional: absent in some checkpoints; then zeros.
    """

    name: str
    dims: tuple[Dim, ...]
    layers: tuple[int, ...] | None = None
    experts: int | None = None
    dtype: str = "weight"
    init: str = "normal"
    also: tuple[str | Part, ...] = ()
    optional: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        lead: tuple[int, ...] = () if self.layers is None else (len(self.layers),)
        lead += () if self.experts is None else (self.experts,)
        return lead + tuple(dim.stored for dim in self.dims)

    @property
    def axes(self) -> tuple[str | None, ...]:
        lead: tuple[str | None, ...] = () if self.layers is None else ("layers",)
        lead += () if self.experts is None else ("experts",)
        return lead + tuple(dim.axis for dim in self.dims)

    def places(self) -> Iterator[tuple[tuple[int, ...], dict[str, int]]]:
        """(leading index in the stacked array, names to fill in) of every tensor of the file."""
        layers = list(enumerate(self.layers)) if self.layers is not None else [(None, None)]
        experts = list(range(self.experts)) if self.experts is not None else [None]
        for at, layer in layers:
            for expert in experts:
                lead = tuple(i for i in (at, expert) if i is not None)
                fill = {"layer": layer, "expert": expert}
                yield lead, {k: v for k, v in fill.items() if v is not None}


Tree = dict[str, Any]
"""A nested dict whose leaves are Params (or, derived from it, arrays, shapes, specs)."""


def is_param(leaf: Any) -> bool:
    return isinstance(leaf, Param)


def map_params(function, tree: Tree, *rest: Any) -> Any:
    return jax.tree.map(function, tree, *rest, is_leaf=is_param)


def leaves(tree: Tree) -> list[tuple[str, Param]]:
    """(dotted path, declaration) of every parameter."""
    found = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_param)
    return [(".".join(str(k.key) for k in path), param) for path, param in found]


def also_spelled(tree: Tree, prefix: str, other: str) -> Tree:
    """The tree with every name that starts with `prefix` accepted under `other` too (text-only
    checkpoints of a multimodal family)."""

    def one(option: str | Part) -> tuple[str | Part, ...]:
        name = option if isinstance(option, str) else option.name
        if not name.startswith(prefix):
            return (option,)
        name = other + name.removeprefix(prefix)
        return (option, name if isinstance(option, str) else dataclasses.replace(option, name=name))

    def both(param: Param) -> Param:
        options = [o for option in (param.name, *param.also) for o in one(option)]
        return dataclasses.replace(param, also=tuple(options[1:]))

    return map_params(both, tree)


def dtype_of(param: Param, dtype: str) -> jnp.dtype:
    return jnp.dtype(dtype if param.dtype == "weight" else param.dtype)


def shapes(tree: Tree, dtype: str) -> Any:
    """The arrays' shapes and dtypes when nothing is quantized, without allocating."""
    return map_params(lambda p: jax.ShapeDtypeStruct(p.shape, dtype_of(p, dtype)), tree)


def specs(tree: Tree, ranks: int) -> Any:
    """The PartitionSpec of every (unquantized) parameter."""
    return map_params(lambda p: rules.spec(p.axes, ranks) if ranks > 1 else PartitionSpec(), tree)


def share(tree: Tree, params: Any, rank: int, ranks: int) -> Any:
    """One rank's part of whole (perhaps quantized) parameters, laid out over `ranks`."""
    places = dict(leaves_of(specs(tree, ranks)))
    return unflatten(
        {path: spmd.share_of(leaf, places[path], rank, ranks) for path, leaf in leaves_of(params)}
    )


def nbytes(tree: Tree, dtype: str) -> int:
    return sum(math.prod(p.shape) * dtype_of(p, dtype).itemsize for _, p in leaves(tree))


def initialise(tree: Tree, key: jax.Array, dtype: str) -> Any:
    """Random parameters: what a new model of this shape starts from."""
    params = leaves(tree)
    keys = dict(zip((path for path, _ in params), jax.random.split(key, len(params)), strict=True))

    def one(path: Any, param: Param) -> jax.Array:
        name = ".".join(str(k.key) for k in path)
        target = dtype_of(param, dtype)
        if param.init == "zeros":
            return jnp.zeros(param.shape, target)
        if param.init == "ones":
            return jnp.ones(param.shape, target)
        fan_in = param.dims[-1].size
        draw = jax.random.normal(keys[name], param.shape, jnp.float32)
        return (draw / math.sqrt(fan_in)).astype(target)

    return jax.tree_util.tree_map_with_path(one, tree, is_leaf=is_param)


def leaves_of(tree: Any) -> list[tuple[str, Any]]:
    """(dotted path, leaf) of a nested dict derived from declarations."""
    found = []
    for key, value in tree.items():
        if isinstance(value, dict):
            found += [(f"{key}.{path}", leaf) for path, leaf in leaves_of(value)]
        else:
            found.append((key, value))
    return found


def unflatten(flat: dict[str, Any]) -> Any:
    """The nested dict of {dotted path: leaf}."""
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        *parents, name = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return tree
