"""What one rank holds of a checkpoint, planned before it is read, then read straight into place.

`plan` builds every parameter of a rank over views of the mapped files: formats slice views without
touching data, so a plan costs the headers alone. A plane of a stacked parameter is then a list of
views (`Planned`), and filling it is reading those views into its rows. What a format cannot give as
a view (codes that have to be packed anew) is made when its turn comes, and forgotten after.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..mesh import rules
from ..mesh.units import take
from ..models import params as declarations
from ..models.params import Param, Part, Tree
from . import formats
from .checkpoint import Checkpoint, tensors_of
from .digest import Seen
from .direct import Job, Reader, empty, pages, up
from .errors import CheckpointError
from .formats import gather
from .formats.bf16 import Bf16Tensor, bf16_tensor
from .formats.exl3 import Exl3Tensor
from .formats.mixed import Mixed
from .formats.ordered import in_order

KEEP = 128 << 20
"""Bytes of computed planes that a plan may hold; further ones are computed again when needed."""
GROUP = 128 << 20
"""Bytes of the host buffer through which a device is filled."""
SCALES = ("scale", "whole", "in_scale", "out_scale")
"""Planes whose numbers must be finite."""


@dataclasses.dataclass(eq=False)
class Planned:
    """A plane that is not there yet.

    Attributes:
      shape, dtype: of the stacked plane.
      sources: for each member (row-major over the leading axes) what fills it: a view of a mapped
        file, an array, or a `Later`.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    sources: Sequence[Any]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def rest(self) -> tuple[int, ...]:
        """The shape of one member."""
        return tuple(self.sources[0].shape)


class Member:
    """A member that has to be computed: all its planes at once, held until each was taken."""

    def __init__(self, build: Callable[[], Any]):
        self._build = build
        self._planes: dict[int, np.ndarray] = {}

    def take(self, at: int) -> np.ndarray:
        if at not in self._planes:
            self._planes = dict(enumerate(jax.tree.leaves(self._build())))
        return self._planes.pop(at)


@dataclasses.dataclass(frozen=True, eq=False)
class Later:
    """Plane `at` of a member that is computed when it is needed."""

    member: Member
    at: int
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One parameter of one rank.

    Attributes:
      tree: a `Planned`, or a quantized node over some.
      sharded: whether other ranks hold other parts.
      weights: names of the weights it is made of.
    """

    tree: Any
    sharded: bool
    weights: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        return sum(plane.nbytes for plane in jax.tree.leaves(self.tree))

    @property
    def format(self) -> str:
        """What its numbers are stored as, in a word."""
        return format_of(self.tree)


def format_of(tree: Any) -> str:
    """A word for how an array or a node stores its numbers."""
    if isinstance(tree, Mixed):
        return "+".join(sorted({format_of(s) for s in tree.stacks}))
    if not formats.is_quantized(tree):
        return np.dtype(tree.dtype).name
    if hasattr(tree, "kind"):
        return str(tree.kind)
    inner = getattr(tree, "inner", None)
    if inner is not None:
        return format_of(inner)
    name = type(tree).__name__.removesuffix("Tensor").lower()
    main = np.dtype(tree._main()[0].dtype).name
    return main if name == "scaled" else name


def plan(
    tree: Tree, checkpoint: Checkpoint, ranks: int = 1, rank: int = 0, *, twelve_bits: bool = False
) -> dict[str, Leaf]:
    """Every declared parameter of one rank, by dotted path; nothing large is read.

    Raises:
      CheckpointError: a tensor's shape differs from the declaration, or its format is not known.
    """
    kept = Kept()
    return {
        path: _leaf(param, checkpoint, ranks, rank, twelve_bits, kept)
        for path, param in declarations.leaves(tree)
    }


def spelling(param: Param, fill: dict[str, int], checkpoint: Checkpoint) -> str | Part | None:
    """The first of a parameter's names that the checkpoint has."""
    for option in (param.name, *param.also):
        name = option.name if isinstance(option, Part) else option
        if tensors_of(checkpoint, name.format(**fill)):
            return option.format(**fill) if isinstance(option, str) else option
    return None


@dataclasses.dataclass
class Kept:
    """How much of computed planes a plan holds."""

    nbytes: int = 0


def _leaf(
    param: Param, checkpoint: Checkpoint, ranks: int, rank: int, twelve_bits: bool, kept: Kept
) -> Leaf:
    spec = rules.spec([d.axis for d in param.dims], ranks)
    cuts = cuts_of(param, ranks)
    members: list[Any] = []
    names: list[str] = []
    last: tuple[str, Any] = ("", None)
    for _, fill in param.places():
        found = spelling(param, fill, checkpoint)
        if found is None:
            members.append(None)
            continue
        name = found if isinstance(found, str) else found.name.format(**fill)
        if name != last[0]:
            last = (name, checkpoint.weight(name, check=False))
            names.append(name)
        what = f"{checkpoint.path}: tensor {name!r}"

        def build(
            weight: Any = last[1], found: Any = found, fill: Any = fill, what: str = what
        ) -> Any:
            return member_of(param, weight, found, fill, cuts, ranks, rank, twelve_bits, what)

        members.append(_light(build, kept, twelve_bits))
    share = tuple(
        d.stored // ranks if ranks > 1 and spec[axis] is not None else d.stored
        for axis, d in enumerate(param.dims)
    )
    lead = param.shape[: len(param.shape) - len(param.dims)]
    return Leaf(
        _stacked(members, lead, share, param.dtype), any(s is not None for s in spec), tuple(names)
    )


Cut = tuple[int, np.ndarray, int, bool]
"""An axis, what stands at each of its places on all ranks, over how many ranks, and whether the
file's order is another one."""


def cuts_of(param: Param, ranks: int) -> list[Cut]:
    """The axes of a parameter whose places on the ranks are not simply those of the file."""
    spec = rules.spec([d.axis for d in param.dims], ranks)
    cuts = []
    for axis, dim in enumerate(param.dims):
        parts = ranks if ranks > 1 and spec[axis] is not None else 1
        plain = dim.units is None or dim.units.identity
        if parts > 1 or not plain:
            index = np.arange(dim.size) if dim.units is None else dim.units.gather()
            cuts.append((axis, index, parts, not plain))
    return cuts


def member_of(
    param: Param,
    weight: Any,
    found: str | Part,
    fill: dict[str, int],
    cuts: list[Cut],
    ranks: int,
    rank: int,
    twelve_bits: bool,
    what: str,
) -> Any:
    """One rank's share of one layer's (expert's) tensor: views where that is possible."""
    if isinstance(found, Part):
        if param.experts is not None and "{expert}" not in found.name:
            expert = fill["expert"]
            weight = weight.at(expert) if formats.is_quantized(weight) else weight[expert]
        weight = rows_of(weight, found.ranges)
    dense = param.dtype == "weight" and not formats.is_quantized(weight)
    if twelve_bits and dense and weight.ndim == 2 and weight.dtype.name == "bfloat16":
        weight = bf16_tensor(weight) or weight
    weight = _fitted(param, weight, what)
    for axis, index, parts, _ in cuts:
        only = rank if parts > 1 else None
        if formats.is_quantized(weight):
            weight = formats.pick(weight, axis - len(param.dims), index, parts, only)
        else:
            weight = take(weight, axis, gather.own(index, parts, only)[0])
    if not any(parts > 1 and axis == len(param.dims) - 1 for axis, _, parts, _ in cuts):
        # Of a share of the inputs, groups may differ in size from rank to rank.
        weight = in_order(weight)
    if param.dtype != "weight" and formats.is_quantized(weight):
        # Asked for as numbers, whatever the file has.
        weight = np.array(formats.dequantize(jax.tree.map(jnp.asarray, weight)))
    return weight


def rows_of(weight: Any, ranges: tuple[tuple[int, int], ...]) -> Any:
    """Rows of a larger tensor, in order."""
    index = np.concatenate([np.arange(a, b) for a, b in ranges])
    if formats.is_quantized(weight):
        return formats.pick(weight, formats.ROWS, index)
    return take(weight, 0, index)


def _fitted(param: Param, weight: Any, what: str) -> Any:
    """The weight in the declared shape; padding that a format adds is cropped."""
    shape = tuple(formats.logical_shape(weight))
    declared = tuple(d.size for d in param.dims)
    if shape == declared:
        return weight
    if isinstance(weight, Exl3Tensor) and len(declared) == 2:
        # Padded to whole rotation blocks.
        try:
            return weight.cropped(*declared)
        except CheckpointError as error:
            raise CheckpointError(f"{what}: {error}") from None
    if math.prod(shape) == math.prod(declared) and not formats.is_quantized(weight):
        return weight.reshape(declared)
    raise CheckpointError(f"{what} is {list(shape)}; the config asks for {list(declared)}")


def _light(build: Callable[[], Any], kept: Kept, twelve_bits: bool) -> Any:
    """A member, with its computed planes held only while there is room for them."""
    member = build()
    planes, structure = jax.tree.flatten(member)
    if isinstance(member, Bf16Tensor):
        return member  # its neighbours decide its size
    computed = sum(p.nbytes for p in planes if not _is_view(p))
    if kept.nbytes + computed <= KEEP:
        kept.nbytes += computed
        return member
    again = Member(build)
    later = [Later(again, i, tuple(p.shape), p.dtype) for i, p in enumerate(planes)]
    return jax.tree.unflatten(structure, later)


def _is_view(plane: np.ndarray) -> bool:
    """Whether an array owns no memory of its own (a view of a map, for instance)."""
    base: Any = plane
    while isinstance(base, np.ndarray):
        if base.flags.owndata:
            return False
        base = base.base
    return True


def _stacked(members: list[Any], lead: tuple[int, ...], share: tuple[int, ...], dtype: str) -> Any:
    """Members (None: absent, zeros) as one parameter of planned planes."""
    here = [m for m in members if m is not None]
    if any(formats.is_quantized(m) for m in here):
        zero = np.broadcast_to(np.zeros((), np.float32), share)
        return formats.stack([zero if m is None else m for m in members], lead, _planned)
    if dtype != "weight":
        target = np.dtype(dtype)
    else:
        # One array has one dtype: the one that holds all the file's.
        target = np.dtype(np.float32)
        if here:
            target = np.dtype(jnp.result_type(*{jnp.dtype(m.dtype) for m in here}))
    zero = np.broadcast_to(np.zeros((), target), share)
    return Planned((*lead, *share), target, [zero if m is None else m for m in members])


def _planned(planes: Sequence[Any], lead: tuple[int, ...]) -> Planned:
    return Planned((*lead, *planes[0].shape), np.dtype(planes[0].dtype), list(planes))


# --- Filling ----------------------------------------------------------------------------------


def stacks_of(tree: Any) -> Sequence[Any]:
    """The parts of a parameter whose planes have equally many members each."""
    return tree.stacks if isinstance(tree, Mixed) else (tree,)


def to_host(leaves: Sequence[Leaf], reader: Reader, checkpoint: Checkpoint) -> list[Any]:
    """Parameters as host arrays; all are read at once."""
    filled: list[Any] = []

    def jobs() -> Iterator[Job]:
        for leaf in leaves:
            filled.append(jax.tree.map(lambda plane: empty(plane.shape, plane.dtype), leaf.tree))
            yield from _jobs(leaf.tree, filled[-1])

    reader.fill(jobs())
    for leaf, tree in zip(leaves, filled, strict=True):
        check_scales(tree, leaf, checkpoint)
    return filled


def _jobs(planned: Any, filled: Any) -> Iterator[Job]:
    for stack, target in zip(stacks_of(planned), stacks_of(filled), strict=True):
        pairs = zip(jax.tree.leaves(stack), jax.tree.leaves(target), strict=True)
        flat = [(p, t.reshape(len(p.sources), *p.rest)) for p, t in pairs]
        # A member's planes together, so that a computed one can go.
        for i in range(len(flat[0][0].sources)):
            for plane, rows in flat:
                yield rows[i, ...], _source(plane, i)


def to_device(
    leaf: Leaf, reader: Reader, checkpoint: Checkpoint, device: Any, seen: Seen | None = None
) -> Any:
    """The parameter on a device with memory of its own, through a host buffer of bounded size."""
    if leaf.nbytes <= GROUP:
        (filled,) = to_host([leaf], reader, checkpoint)
        if seen is not None:
            seen.whole(filled)
        return jax.tree.map(lambda a: jax.device_put(a, device), filled)
    results: list[Any] = []
    buffer = pages(0)
    for stack in stacks_of(leaf.tree):
        planes, structure = jax.tree.flatten(stack)
        with jax.default_device(device):
            arrays = [jnp.zeros(p.shape, p.dtype) for p in planes]
        for group in _groups(planes):
            shapes = {
                k: (sum(map(len, sources)), *planes[k].rest[1:])
                for k, (_, sources) in group.items()
            }
            sizes = {k: math.prod(s) * planes[k].dtype.itemsize for k, s in shapes.items()}
            if sum(map(up, sizes.values())) > buffer.size:
                buffer = pages(sum(map(up, sizes.values())), reused=True)
            # All groups share one buffer, which is free again when they are in place: the runtime lets
            # go of an array of the host's some time after it was copied, and a new one would be
            # beside it.
            ends = itertools.accumulate(map(up, sizes.values()))
            staged = {
                k: buffer[end - up(sizes[k]) :][: sizes[k]].view(planes[k].dtype).reshape(shapes[k])
                for k, end in zip(shapes, ends, strict=True)
            }
            reader.fill(
                (staged[k][at : at + len(source)], source)
                for k, (_, sources) in group.items()
                for at, source in _offsets(sources)
            )
            for k, (first, _) in group.items():
                if seen is not None:
                    before = len(jax.tree.leaves(results))
                    seen.rows(leaf.tree, before + k, staged[k], first, planes[k].rest)
                arrays[k] = _put(arrays[k], jax.device_put(staged[k], device), first)
            jax.block_until_ready(arrays)
        node = jax.tree.unflatten(structure, arrays)
        check_scales(node, leaf, checkpoint)
        results.append(node)
    if isinstance(leaf.tree, Mixed):
        return leaf.tree.replace(stacks=tuple(results))
    return results[0]


Group = dict[int, tuple[int, list[np.ndarray]]]
"""For a plane (by its place among a node's), the first row and what fills the rows from there on;
rows are those of all members, one after the other."""


def _groups(planes: list[Planned]) -> Iterator[Group]:
    """All rows of all planes, cut so that the bytes of a group stay within GROUP."""
    group: Group = {}
    used = 0
    for i in range(len(planes[0].sources)):
        for k, plane in enumerate(planes):
            rows = plane.rest[0] if plane.rest else 1
            source = _source(plane, i).reshape(rows, *plane.rest[1:])
            each = max(math.prod(plane.rest[1:]) * plane.dtype.itemsize, 1)
            step = max(1, GROUP // each)
            for start in range(0, rows, step):
                piece = source[start : start + step]
                if group and used + len(piece) * each > GROUP:
                    yield group
                    group, used = {}, 0
                group.setdefault(k, (i * rows + start, []))[1].append(piece)
                used += len(piece) * each
    if group:
        yield group


def _offsets(sources: list[np.ndarray]) -> Iterator[tuple[int, np.ndarray]]:
    at = 0
    for source in sources:
        yield at, source
        at += len(source)


def _put_rows(array: jax.Array, rows: jax.Array, first: Any) -> jax.Array:
    flat = array.reshape(-1, *rows.shape[1:])
    start = (first, *(0,) * (rows.ndim - 1))
    return jax.lax.dynamic_update_slice(flat, rows, start).reshape(array.shape)


_put = jax.jit(_put_rows, donate_argnums=0)


def _source(plane: Planned, i: int) -> np.ndarray:
    source = plane.sources[i]
    return source.member.take(source.at) if isinstance(source, Later) else source


def check_scales(filled: Any, leaf: Leaf, checkpoint: Checkpoint) -> None:
    """Raises CheckpointError if a scale is not a number, or is zero and divides; names its tensor."""
    if not leaf.weights or all(_sound(*scale) for scale in _scales(filled)):
        return  # what an image holds was checked before it was written
    for name in leaf.weights:
        checkpoint.weight(name, check=True)
    raise CheckpointError(
        f"{checkpoint.path}: a scale of {leaf.weights[0]!r} (or one of its kind) is not a number"
    )


def _scales(node: Any) -> Iterator[tuple[Any, bool]]:
    """Every scale of a node, and whether it divides."""
    if not dataclasses.is_dataclass(node):
        return
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        if field.name in SCALES and value is not None:
            yield value, bool(field.name == "whole" and getattr(node, "divide", False))
        elif field.name in ("stacks", "parts"):
            for inner in value:
                yield from _scales(inner)
        elif field.name == "inner":
            yield from _scales(value)


def _sound(scale: Any, divides: bool) -> bool:
    xp: Any = np if isinstance(scale, np.ndarray) else jnp
    for part in scale if scale.ndim > 2 else (scale,):
        if scale.dtype == np.uint8:
            if bool((part == 0xFF).any()):
                return False
        elif not bool(xp.isfinite(part.astype(np.float32)).all()):
            return False
        if divides and not bool(part.all()):
            return False
    return True
