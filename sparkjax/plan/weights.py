"""The shapes of a published checkpoint's parameters on the devices, nothing read or allocated.

One tensor of every (parameter, layout) is built from zeros by the loader's own code; the rest of a
stack has the same shapes.
"""

from __future__ import annotations

import collections
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..manifests import Manifest
from ..mesh import rules
from ..models import params as declarations
from ..models.params import Dim, Param
from ..weights import formats
from ..weights.detect import detect
from ..weights.formats.mixed import Mixed
from ..weights.published import written
from . import on_disk


def abstract_weights(
    manifest: Manifest, tree: declarations.Tree, ranks: int, dtype: str = "bfloat16"
) -> Any:
    """Shapes by the tree's paths, of all ranks together: arrays, or quantized nodes of shapes.

    Args:
      tree: the declarations over `ranks`.
      dtype: of weights that are not quantized; a checkpoint on disk has its own.
    """
    if isinstance(manifest, on_disk.OnDisk):
        return on_disk.abstract_weights(manifest.checkpoint, tree, ranks)
    flat = {
        path: _leaf(manifest, param, ranks, dtype) for path, param in declarations.leaves(tree)
    }
    return declarations.unflatten(flat)


def _leaf(manifest: Manifest, param: Param, ranks: int, dtype: str) -> Any:
    dense = jax.ShapeDtypeStruct(param.shape, declarations.dtype_of(param, dtype))
    if param.dtype != "weight" or len(param.dims) != 2:
        return dense
    # All experts of a layer lie there alike.
    layers = param.layers or (0,)
    layouts = [
        layout
        for layer in layers
        for layout in [manifest.layout(param.name.format(layer=layer, expert=0))]
        * (param.experts or 1)
    ]
    if not any(layouts):
        return dense
    lead = param.shape[: len(param.shape) - len(param.dims)]
    counts = collections.Counter(layouts)
    stacks = {layout: _one(layout, param.dims, ranks, dtype) for layout in counts}
    if len(stacks) == 1:
        return _lead(stacks[layouts[0]], lead)
    order = list(stacks)
    slots, seen = [], collections.Counter[Any]()
    for layout in layouts:
        slots.append(seen[layout])
        seen[layout] += 1
    inner = (1,) * (len(lead) - 1)
    return Mixed(
        tuple(_lead(stacks[layout], (counts[layout], *inner)) for layout in order),
        tuple(order.index(layout) for layout in layouts),
        tuple(slots),
        lead,
    )


@functools.lru_cache(maxsize=256)
def _one(layout: str | None, dims: tuple[Dim, ...], ranks: int, dtype: str) -> Any:
    """One layer's (or expert's) weight laid out over the ranks, as shapes."""
    n, k = (dim.size for dim in dims)
    if layout is None:
        return jax.ShapeDtypeStruct(tuple(d.stored for d in dims), jnp.dtype(dtype))
    tensors = written(layout, "x.weight", n, k)
    (stored,) = detect(tensors).values()

    def read(name: str) -> np.ndarray:
        kind, shape = tensors[name]
        return np.array([n, k]) if name.endswith("_shape") else np.zeros(shape, kind)

    node = stored.build(read, check=False)
    spec = rules.spec([dim.axis for dim in dims], ranks)
    for axis, dim in zip((formats.ROWS, formats.COLS), dims, strict=True):
        parts = ranks if ranks > 1 and spec[axis] is not None else 1
        if parts > 1 or (dim.units is not None and not dim.units.identity):
            index = np.arange(dim.size) if dim.units is None else dim.units.gather()
            node = formats.pick(node, axis, index, parts)
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), node)


def _lead(node: Any, lead: tuple[int, ...]) -> Any:
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct((*lead, *s.shape), s.dtype), node)
