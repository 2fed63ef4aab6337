"""From a checkpoint's tensors to a model's (sharded) parameter arrays."""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
import logging
import mmap
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ..mesh import spmd
from ..models import params as declarations
from ..models.params import Tree
from . import direct, formats, image, stream
from .checkpoint import Checkpoint, tensors_of
from .digest import Notes, Seen
from .direct import Reader
from .errors import CheckpointError
from .stream import Leaf

log = logging.getLogger(__name__)
Progress = Callable[[int, int], None]
"""Called with (bytes that have arrived, bytes in all), from any thread."""
DIRECT_FROM = 1 << 30
"""Bytes of a checkpoint from which on files are read past the page cache; a smaller one may well
be there already, or be wanted again soon."""


@dataclasses.dataclass(frozen=True)
class Reading:
    """How files are read.

    Attributes:
      parallel: reads at a time.
      direct: past the page cache; None decides by size.
    """

    parallel: int = 16
    direct: bool | None = None


@dataclasses.dataclass(frozen=True)
class Images:
    """Device-ready shares on disk (see `weights.image`).

    Attributes:
      folder: where they lie.
      verify: compare checksums before an image is used.
      progress: of writing one: (bytes done, bytes in all).
    """

    folder: Path
    verify: bool = False
    progress: Progress | None = None


def check_names(tree: Tree, checkpoint: Checkpoint, ignored: Iterable[str] = ()) -> None:
    """Raises unless the checkpoint holds exactly the declared tensors.

    Args:
      ignored: name prefixes of tensors that this model does not read; `*` stands for anything.
    """
    expected: set[str] = set()
    missing: list[str] = []
    for _, param in declarations.leaves(tree):
        for _, fill in param.places():
            found = stream.spelling(param, fill, checkpoint)
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
    rank: int | None = None,
    mesh: Mesh | None = None,
    expand: Callable[[Any], bool] = lambda leaf: False,
    ignored: Iterable[str] = (),
    progress: Progress | None = None,
    twelve_bits: bool = False,
    reading: Reading = Reading(),
    before: Callable[[dict[int, dict[str, int]]], None] = lambda weights: None,
    images: Images | None = None,
    facts: Mapping[str, Any] | None = None,
    notes: Notes | None = None,
) -> Any:
    """The declared parameters, stacked and placed. Each rank's bytes are read straight into its
    arrays: on a CPU those are the buffers that were read into.

    Args:
      ranks: over how many the declarations are spread.
      rank: only this rank's share, as arrays of the share's own shape on the default device; None
        with a mesh is the global arrays, of which this process reads what its devices hold.
      mesh: whose devices are the ranks; needed for several unless `rank` is given.
      twelve_bits: keep large BF16 matrices in the lossless 12-bit form.
      expand: given a (quantized or half precision) parameter, whether to store it as float32
        instead, because nothing here computes with its format.
      before: called before anything is allocated: for each rank of this process, bytes by weight
        format.
      images: where device-ready shares are kept from one start to the next.
      facts: what decides about a share's bytes beside checkpoint, declarations and rank: an image
        made under others is not used.
      notes: take down the digests of what was read.

    Raises:
      CheckpointError: missing or unexpected tensors, shapes that differ from the declaration, or
        scales that are not numbers.
    """
    if ranks > 1 and rank is None and mesh is None:
        raise ValueError(f"{ranks} ranks need a mesh, or the rank whose share is loaded")
    places = _places(mesh, rank)
    _require_share(checkpoint, ranks, places)
    # Without files nothing would say when an image is out of date.
    images = images if checkpoint.files else None
    files = list(checkpoint.files)
    facts = {**(facts or {}), "twelve_bits": twelve_bits}
    keys = {r: image.key_of(checkpoint, tree, ranks, r, facts) for r in places if images}
    plans: dict[int, dict[str, Leaf]] = {}
    for r, opened in _opened(images, checkpoint, ranks, keys).items():
        plans[r] = opened.leaves
        files.append((opened.path, opened.mapped))
    fresh = [r for r in places if r not in plans]
    held: dict[str, dict[int, Any]] = {}
    with Reader(files, parallel=reading.parallel) as reader:
        if fresh:
            check_names(tree, checkpoint, ignored)
        for r in fresh:
            plans[r] = stream.plan(tree, checkpoint, ranks, r, twelve_bits=twelve_bits)
        _forget(checkpoint)
        expanded = {
            (r, path)
            for r, plan in plans.items()
            for path, leaf in plan.items()
            if expand(leaf.tree)
        }
        before(summary(plans, expanded))
        reads = []
        for path, leaf in plans[min(places)].items():
            held[path] = {}
            # What every rank holds whole is read once.
            reads += [(r, path) for r in (places if leaf.sharded else list(places)[:1])]
        total = sum(plans[r][path].nbytes for r, path in reads)
        reader.direct = total >= DIRECT_FROM if reading.direct is None else reading.direct
        reader.advance = _counted(progress, total)
        started = time.monotonic()
        for some in _together(reads, places, expanded):
            # A plan goes as it is read: its views and computed planes are no longer needed then.
            leaves = [plans[r].pop(path) for r, path in some]
            r, path = some[0]
            seen = [Seen(notes, r, path) for r, path in some] if notes is not None else None
            found = _placed(leaves, reader, checkpoint, places[r], (r, path) in expanded, seen)
            for (r, path), share in zip(some, found, strict=True):
                held[path][r] = share
        log.info(
            "weights: %.2f GiB in %.2f s (%.2f GiB asked of the files)",
            total / 2**30, time.monotonic() - started, reader.read / 2**30,
        )  # fmt: skip
    if images is not None:
        for r in fresh:
            share = {path: found.get(r, next(iter(found.values()))) for path, found in held.items()}
            _keep(images, checkpoint, ranks, r, keys[r], share)
    specs = dict(declarations.leaves_of(declarations.specs(tree, ranks)))
    loaded = {path: _global(found, places, mesh, specs[path]) for path, found in held.items()}
    return declarations.unflatten(loaded)


def _require_share(checkpoint: Checkpoint, ranks: int, wanted: Iterable[int]) -> None:
    """Raises CheckpointError where the files hold another rank's bytes only."""
    share = getattr(checkpoint, "share", None)
    if share is not None and any((r, ranks) != tuple(share) for r in wanted):
        raise CheckpointError(
            f"{checkpoint.path}: holds what rank {share[0]} of {share[1]} reads; asked for is rank "
            f"{', '.join(map(str, wanted))} of {ranks}: pull that, or whole files"
        )


def _opened(
    images: Images | None, checkpoint: Checkpoint, ranks: int, keys: Mapping[int, dict[str, Any]]
) -> dict[int, image.Image]:
    """The images that there are."""
    found = {}
    for rank, key in keys.items():
        assert images is not None
        path = image.path_of(images.folder, checkpoint, ranks, rank)
        opened = image.open_image(path, key, verify=images.verify)
        if opened is not None:
            log.info("weights come from %s", path)
            found[rank] = opened
    return found


def _keep(
    images: Images, checkpoint: Checkpoint, ranks: int, rank: int, key: dict, share: dict[str, Any]
) -> None:
    """Writes a share's image."""
    path = image.path_of(images.folder, checkpoint, ranks, rank)
    total = sum(a.nbytes for a in jax.tree.leaves(share))
    started = time.monotonic()
    if image.save(path, key, share, _counted(images.progress, total)):
        seconds = time.monotonic() - started
        log.info("%s: %.2f GiB written in %.1f s", path, total / 2**30, seconds)


def summary(
    plans: Mapping[int, Mapping[str, Leaf]], expanded: Container[tuple[int, str]] = ()
) -> dict[int, dict[str, int]]:
    """For each rank, bytes by weight format of its planned parameters.

    Args:
      plans: by rank.
      expanded: (rank, path) of those that become float32.
    """
    found: dict[int, dict[str, int]] = {rank: {} for rank in plans}
    for rank, plan in plans.items():
        for path, leaf in plan.items():
            name, nbytes = leaf.format, leaf.nbytes
            if (rank, path) in expanded:
                name, nbytes = "float32", 4 * int(np.prod(formats.logical_shape(leaf.tree)))
            found[rank][name] = found[rank].get(name, 0) + nbytes
    return found


def _places(mesh: Mesh | None, rank: int | None) -> dict[int, Any]:
    """The device of every rank that this process holds."""
    if mesh is None:
        return {rank or 0: jax.local_devices()[0]}
    here = jax.process_index()
    return {r: d for r, d in enumerate(mesh.devices.flat) if d.process_index == here}


Read = tuple[int, str]
"""A rank and a parameter's path."""


def _together(
    reads: list[Read], places: dict[int, Any], expanded: Container[Read]
) -> Iterator[list[Read]]:
    """What is read at once: all that goes to one CPU device as it is; everything else by itself."""
    for rank, some in itertools.groupby(sorted(reads, key=lambda read: read[0]), lambda r: r[0]):
        plain = []
        for read in some:
            if places[rank].platform == "cpu" and read not in expanded:
                plain.append(read)
            else:
                yield [read]
        if plain:
            yield plain


def _placed(
    leaves: list[Leaf],
    reader: Reader,
    checkpoint: Checkpoint,
    device: Any,
    expanded: bool,
    seen: list[Seen] | None = None,
) -> list[Any]:
    """One rank's parameters on its device."""
    if not expanded and device.platform != "cpu":
        watched: list[Seen | None] = list(seen) if seen else [None] * len(leaves)
        return [
            stream.to_device(leaf, reader, checkpoint, device, one)
            for leaf, one in zip(leaves, watched, strict=True)
        ]
    filled = stream.to_host(leaves, reader, checkpoint)
    if expanded:
        filled = [_numbers(tree) for tree in filled]
    for one, tree in zip(seen or (), filled, strict=False):
        one.whole(tree)
    # A CPU device takes a host array over as it is.
    return [jax.tree.map(lambda a: jax.device_put(a, device), tree) for tree in filled]


def _numbers(filled: Any) -> np.ndarray:
    """float32 of a host array or node, one layer at a time."""
    if not formats.is_quantized(filled):
        return filled.astype(np.float32)
    shape = formats.logical_shape(filled)
    filled = jax.tree.map(jnp.asarray, filled)
    if len(shape) < 3:
        return np.asarray(_dequantized(filled, None))
    out = direct.empty(shape, np.float32)
    for i in range(shape[0]):
        out[i] = _dequantized(filled, i)
    return out


_dequantized = jax.jit(formats.dequantize)


def _global(held: dict[int, Any], places: dict[int, Any], mesh: Mesh | None, spec: Any) -> Any:
    """The ranks' shares as one parameter."""
    if mesh is None:
        return next(iter(held.values()))
    sharding = spmd.shardings(mesh, spec)
    one = next(iter(held.values()))
    # What is not sharded was read once.
    shares = [
        held[r] if r in held else jax.tree.map(lambda a, d=d: jax.device_put(a, d), one)
        for r, d in places.items()
    ]

    def join(*planes: jax.Array) -> jax.Array:
        shape = spmd.whole(sharding.spec, planes[0].shape, mesh.size)
        return jax.make_array_from_single_device_arrays(shape, sharding, list(planes))

    return jax.tree.map(join, *shares)


def _counted(progress: Progress | None, total: int) -> Callable[[int], None]:
    """Adds up what has arrived."""
    if progress is None:
        return lambda nbytes: None
    lock = threading.Lock()
    done = 0

    def advance(nbytes: int) -> None:
        nonlocal done
        with lock:
            done += nbytes
            now = done
        progress(min(now, total), total)

    return advance


def _forget(checkpoint: Checkpoint) -> None:
    """Gives back the pages of the maps that planning has touched."""
    for _, mapped in checkpoint.files:
        owner = getattr(mapped.base, "obj", mapped.base)
        if isinstance(owner, mmap.mmap):
            owner.madvise(mmap.MADV_DONTNEED)


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
