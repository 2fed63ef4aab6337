"""From a checkpoint's tensors to a model's (sharded) parameter arrays."""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ..mesh import spmd
from ..mesh.units import take
from ..models import params as declarations
from ..models.params import Param, Part, Tree
from . import formats
from .checkpoint import Checkpoint
from .errors import CheckpointError
from .formats.gguf import GGUFTensor

log = logging.getLogger(__name__)
Progress = Callable[[int, int], None]
"""Called with (parameters done, parameters in all)."""


def check_names(tree: Tree, checkpoint: Checkpoint, ignored: Iterable[str] = ()) -> None:
    """Raises unless the checkpoint holds exactly the declared tensors.

    Args:
      ignored: name prefixes of tensors that this model does not read; `*` stands for anything.
    """
    expected: set[str] = set()
    missing: list[str] = []
    for _, param in declarations.leaves(tree):
        for _, fill in param.places():
            found = _spelling(param, fill, checkpoint)
            if found is not None:
                expected.add(found if isinstance(found, str) else found.name.format(**fill))
            elif not param.optional:
                missing.append(param.name.format(**fill))
    skip = [f"{prefix}*" for prefix in ignored]
    unexpected = sorted(
        name
        for name in checkpoint.names - expected
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in skip)
    )
    problems = [
        f"{len(names)} {what} tensor{'s' * (len(names) > 1)}: {', '.join(names[:5])}"
        + (", ..." if len(names) > 5 else "")
        for what, names in (("missing", missing), ("unexpected", unexpected))
        if names
    ]
    if problems:
        raise CheckpointError(f"{checkpoint.path}: {'; '.join(problems)}")


def load_params(
    tree: Tree,
    checkpoint: Checkpoint,
    *,
    ranks: int = 1,
    mesh: Mesh | None = None,
    expand: Callable[[Any], bool] = lambda leaf: False,
    ignored: Iterable[str] = (),
    progress: Progress | None = None,
) -> Any:
    """The declared parameters, stacked and placed.

    Args:
      expand: given a loaded (quantized or half precision) leaf, whether to store it as float32
        instead, because nothing here computes with its format.

    Raises:
      CheckpointError: missing or unexpected tensors, or shapes that differ from the declaration.
    """
    check_names(tree, checkpoint, ignored)
    params = declarations.leaves(tree)
    specs = dict(declarations.leaves_of(declarations.specs(tree, ranks)))
    loaded: dict[str, Any] = {}
    for done, (path, param) in enumerate(params):
        leaf = _assemble(param, checkpoint)
        if expand(leaf):
            log.debug("%s: stored as float32", path)
            leaf = np.asarray(formats.dequantize(leaf))
        sharding = spmd.shardings(mesh, specs[path])
        loaded[path] = jax.tree.map(lambda a, s=sharding: jax.device_put(a, s), leaf)
        if progress:
            progress(done + 1, len(params))
    return declarations.unflatten(loaded)


def _spelling(param: Param, fill: dict[str, int], checkpoint: Checkpoint) -> str | Part | None:
    """The first of a parameter's names that the checkpoint has."""
    for option in (param.name, *param.also):
        name = option.name if isinstance(option, Part) else option
        if name.format(**fill) in checkpoint.names:
            return option.format(**fill) if isinstance(option, str) else option
    return None


def _assemble(param: Param, checkpoint: Checkpoint) -> Any:
    """The whole parameter on the host: an array, or a GGUFTensor over one."""
    pieces: list[tuple[tuple[int, ...], np.ndarray | None, str | None]] = []
    for lead, fill in param.places():
        found = _spelling(param, fill, checkpoint)
        if found is None:
            pieces.append((lead, None, None))
            continue
        name = found if isinstance(found, str) else found.name.format(**fill)
        array = checkpoint.read(name)
        kind = checkpoint.kind(name)
        if isinstance(found, Part):
            if param.experts is not None and "{expert}" not in found.name:
                array = array[fill["expert"]]
            array = np.concatenate([array[a:b] for a, b in found.ranges])
        pieces.append((lead, _place(param, array, kind, checkpoint, name), kind))
    kinds = {kind for _, _, kind in pieces}
    if len(kinds) > 1:
        # Layers of one parameter in different block types: numbers are the common ground.
        pieces = [
            (lead, np.asarray(formats.dequantize(_node(array, kind))), None)
            for lead, array, kind in pieces
        ]
    kind = pieces[0][2]
    arrays = [
        np.zeros(tuple(d.stored for d in param.dims), np.float32) if a is None else a
        for _, a, _ in pieces
    ]
    lead_shape = param.shape[: len(param.shape) - len(param.dims)]
    if lead_shape:
        stacked = np.empty((*lead_shape, *arrays[0].shape), arrays[0].dtype)
        for (lead, _, _), array in zip(pieces, arrays, strict=True):
            stacked[lead] = array
    else:
        stacked = np.ascontiguousarray(arrays[0])
    if param.dtype != "weight" and kind is None:
        stacked = stacked.astype(param.dtype)
    return _node(stacked, kind)


def _node(array: np.ndarray, kind: str | None) -> Any:
    return array if kind is None else GGUFTensor(array, kind)


def _place(
    param: Param, array: np.ndarray, kind: str | None, checkpoint: Checkpoint, name: str
) -> np.ndarray:
    """One tensor checked against the declaration, its units laid out over the ranks."""
    shape = tuple(formats.logical_shape(_node(array, kind)))
    declared = tuple(d.size for d in param.dims)
    if shape != declared:
        if int(np.prod(shape)) == int(np.prod(declared)) and kind is None:
            array = array.reshape(declared)
        else:
            raise CheckpointError(
                f"{checkpoint.path}: tensor {name!r} is {list(shape)}; the config asks for {list(declared)}"
            )
    for axis, dim in enumerate(param.dims):
        if dim.units is None or dim.units.identity:
            continue
        if kind is not None and axis == len(param.dims) - 1:
            raise CheckpointError(
                f"{checkpoint.path}: tensor {name!r} ({kind}) cannot be spread along its inputs yet"
            )
        array = take(array, axis, dim.units.gather())
    return array


def expand_where_needed(platform: str) -> Callable[[Any], bool]:
    """Whether a leaf must be stored as float32 on this platform; says so once.

    On a CPU only the native kernel computes with packed or half-precision weights; without it the
    reference would dequantize every weight again at every step.
    """
    from ..kernels.linear import native

    told: set[str] = set()

    def expand(leaf: Any) -> bool:
        packed = formats.is_quantized(leaf)
        kept = (np.float32, np.int32)
        if platform != "cpu" or leaf.ndim < 2 or (not packed and leaf.dtype in kept):
            return False
        weight = leaf if packed else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        reason = native.supports(jax.ShapeDtypeStruct((1, leaf.shape[-1]), jnp.float32), weight)
        if reason is not None and reason not in told:
            told.add(reason)
            log.warning("weights are stored as float32: %s", reason)
        return reason is not None

    return expand
