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

from ..mesh import rules, spmd
from ..mesh.units import take
from ..models import params as declarations
from ..models.params import Param, Part, Tree
from . import formats
from .checkpoint import Checkpoint, tensors_of
from .errors import CheckpointError
from .formats.bf16 import bf16_tensor
from .formats.exl3 import Exl3Tensor

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
                name = found if isinstance(found, str) else found.name.format(**fill)
                expected.update(tensors_of(checkpoint, name))
            elif not param.optional:
                missing.append(param.name.format(**fill))
    skip = [f"{prefix}*" for prefix in ignored]
    unexpected = sorted(
        name
        for name in checkpoint.names - expected - checkpoint.unread
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
    twelve_bits: bool = False,
) -> Any:
    """The declared parameters, stacked and placed.

    Args:
      twelve_bits: keep large BF16 matrices in the lossless 12-bit form.
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
        leaf = _assemble(param, checkpoint, ranks, twelve_bits)
        if expand(leaf):
            log.debug("%s: stored as float32", path)
            leaf = np.asarray(formats.dequantize(jax.tree.map(jnp.asarray, leaf)))
        sharding = spmd.shardings(mesh, specs[path])
        loaded[path] = jax.tree.map(lambda a, s=sharding: jax.device_put(a, s), leaf)
        if progress:
            progress(done + 1, len(params))
    return declarations.unflatten(loaded)


def _spelling(param: Param, fill: dict[str, int], checkpoint: Checkpoint) -> str | Part | None:
    """The first of a parameter's names that the checkpoint has."""
    for option in (param.name, *param.also):
        name = option.name if isinstance(option, Part) else option
        if tensors_of(checkpoint, name.format(**fill)):
            return option.format(**fill) if isinstance(option, str) else option
    return None


def _assemble(param: Param, checkpoint: Checkpoint, ranks: int, twelve_bits: bool) -> Any:
    """The whole parameter on the host: an array, or a QuantizedTensor over some."""
    members = []
    last: tuple[str, Any] = ("", None)
    for _, fill in param.places():
        found = _spelling(param, fill, checkpoint)
        if found is None:
            members.append(np.zeros(tuple(d.stored for d in param.dims), np.float32))
            continue
        name = found if isinstance(found, str) else found.name.format(**fill)
        if name != last[0]:
            last = (name, checkpoint.weight(name))
        weight = last[1]
        if isinstance(found, Part):
            if param.experts is not None and "{expert}" not in found.name:
                expert = fill["expert"]
                weight = weight.at(expert) if formats.is_quantized(weight) else weight[expert]
            weight = _rows(weight, found.ranges)
        if param.dtype != "weight":
            # Asked for as numbers, whatever the file has.
            weight = _host_numbers(weight).astype(param.dtype)
        if twelve_bits and weight.ndim == 2 and weight.dtype.name == "bfloat16":
            weight = bf16_tensor(weight) or weight
        members.append(_place(param, weight, ranks, f"{checkpoint.path}: tensor {name!r}"))
    lead = param.shape[: len(param.shape) - len(param.dims)]
    if any(formats.is_quantized(m) for m in members):
        return formats.stack(members, lead)
    if not lead:
        return np.ascontiguousarray(members[0])
    stacked = np.empty((len(members), *members[0].shape), members[0].dtype)
    for i, member in enumerate(members):
        stacked[i] = member
    return stacked.reshape(*lead, *members[0].shape)


def _host_numbers(weight: Any) -> np.ndarray:
    if not formats.is_quantized(weight):
        return weight
    return np.asarray(formats.dequantize(jax.tree.map(jnp.asarray, weight)))


def _rows(weight: Any, ranges: tuple[tuple[int, int], ...]) -> Any:
    """Rows of a larger tensor, in order."""
    if formats.is_quantized(weight):
        index = np.concatenate([np.arange(a, b) for a, b in ranges])
        return formats.pick(weight, formats.ROWS, index)
    return np.concatenate([weight[a:b] for a, b in ranges])


def _place(param: Param, weight: Any, ranks: int, what: str) -> Any:
    """One tensor checked against the declaration, its units laid out over the ranks."""
    quantized = formats.is_quantized(weight)
    shape = tuple(formats.logical_shape(weight))
    declared = tuple(d.size for d in param.dims)
    if isinstance(weight, Exl3Tensor) and len(declared) == 2 and shape != declared:
        # Padded to whole rotation blocks.
        try:
            weight = weight.cropped(*declared)
        except CheckpointError as error:
            raise CheckpointError(f"{what}: {error}") from None
    elif shape != declared:
        if int(np.prod(shape)) == int(np.prod(declared)) and not quantized:
            weight = weight.reshape(declared)
        else:
            raise CheckpointError(f"{what} is {list(shape)}; the config asks for {list(declared)}")
    spec = rules.spec([d.axis for d in param.dims], ranks)
    for axis, dim in enumerate(param.dims):
        parts = ranks if ranks > 1 and spec[axis] is not None else 1
        if parts == 1 and (dim.units is None or dim.units.identity):
            continue
        index = np.arange(dim.size) if dim.units is None else dim.units.gather()
        if quantized:
            weight = formats.pick(weight, axis - len(param.dims), index, parts)
        elif dim.units is not None and not dim.units.identity:
            weight = take(weight, axis, index)
    return weight


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
