"""A cheap digest of arrays, the same on the host and on the device: are these the bytes?

An array is its rows along the last axis, each cut into 32-bit little-endian words (the last one
padded with zeros). Word i of all rows counts w[i] times an odd pseudo-random 64-bit M(i):

    digest = sum of w[i] * M(i)  mod 2^64,    M(i) = (s(i mod 2^16) | 1) * (s(i div 2^16 + 2^40) | 1)

with s = splitmix64 (Steele, Lea, Flood 2014); multilinear hashing after Carter and Wegman (1979).
Any one wrong word changes it; other differences (rows swapped, say) escape with a chance of 2^-32.
A sum takes its terms in any order: pieces that arrive at different times add up.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .errors import CheckpointError

TABLE = 1 << 16
PART = 4 << 20
"""Bytes that a thread of the host folds at a time."""
BLOCK = 1 << 22
"""Elements that a device folds at a time."""
_FAR = 1 << 40
_WHOLE = (1 << 64) - 1


def _splitmix(x: Any) -> Any:
    """splitmix64 of uint64 arrays, numpy's or jax's."""
    u = np.uint64
    x = x + u(0x9E3779B97F4A7C15)
    x = (x ^ (x >> u(30))) * u(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> u(27))) * u(0x94D049BB133111EB)
    return x ^ (x >> u(31))


@functools.cache
def _table() -> np.ndarray:
    with np.errstate(over="ignore"):
        return _splitmix(np.arange(TABLE, dtype=np.uint64)) | np.uint64(1)


def _far(block: int) -> int:
    with np.errstate(over="ignore"):
        return int(_splitmix(np.array([block + _FAR], np.uint64))[0]) | 1


# --- On the host ---------------------------------------------------------------------------------


def words_a_row(array: Any) -> int:
    """32-bit words of a row along the last axis; a scalar is one row."""
    width = array.shape[-1] if array.ndim else 1
    return -(-width * array.dtype.itemsize // 4)


def host(array: np.ndarray, first_row: int = 0) -> int:
    """The digest of an array, or the part that some of its rows have in it.

    Args:
      array: any dtype of 1, 2, 4 or 8 bytes; rows are those along its last axis.
      first_row: where these rows stand in the whole array.
    """
    wide = words_a_row(array)
    if array.size == 0:
        return 0
    rows = array.reshape(-1, array.shape[-1] if array.ndim else 1)
    if array.nbytes < 2 * PART:
        return _rows(rows, first_row, wide)
    each = max(1, PART * len(rows) // array.nbytes)
    starts = range(0, len(rows), each)
    parts = _pool().map(lambda at: _rows(rows[at : at + each], first_row + at, wide), starts)
    return sum(parts) & _WHOLE


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="digest")


def _rows(rows: np.ndarray, first_row: int, wide: int) -> int:
    each = max(1, TABLE // max(wide, 1))
    total, at = 0, first_row * wide
    for start in range(0, len(rows), each):
        words = _words(rows[start : start + each], wide)
        for begin, piece in _pieces(words, at):
            part = int(np.dot(piece, _table()[begin % TABLE : begin % TABLE + len(piece)]))
            total += part * _far(begin // TABLE)
        at += len(words)
    return total & _WHOLE


def _words(rows: np.ndarray, wide: int) -> np.ndarray:
    """uint64 [rows * wide]."""
    raw = np.ascontiguousarray(rows).view(np.uint8)
    if raw.shape[-1] != 4 * wide:
        padded = np.zeros((len(raw), 4 * wide), np.uint8)
        padded[:, : raw.shape[-1]] = raw
        raw = padded
    return raw.reshape(-1).view("<u4").astype(np.uint64)


def _pieces(words: np.ndarray, at: int) -> Iterator[tuple[int, np.ndarray]]:
    """Words cut where the table begins anew, each piece with the number of its first word."""
    done = 0
    while done < len(words):
        size = min(TABLE - (at + done) % TABLE, len(words) - done)
        yield at + done, words[done : done + size]
        done += size


# --- On the device -------------------------------------------------------------------------------


def device(tree: Any) -> list[int]:
    """The digests of the arrays of a tree that lie on one device, in the order of its leaves."""
    leaves = jax.tree.leaves(tree)
    if all(d.platform == "cpu" for leaf in leaves for d in leaf.devices()):
        # The same memory. (XLA for CPUs would widen bfloat16 to float32 first.)
        return [host(np.asarray(leaf)) for leaf in leaves]
    return folded(leaves)


def folded(arrays: list[jax.Array]) -> list[int]:
    """The digests of arrays as their device computes them."""
    with jax.enable_x64(True):
        return [int(d) for d in jax.device_get(_folded(arrays))]


@jax.jit
def _folded(arrays: list[jax.Array]) -> list[jax.Array]:
    return [_fold(array) for array in arrays]


def _fold(array: jax.Array) -> jax.Array:
    """uint64 []. BLOCK elements at a time: nothing of a large array's size is kept."""
    if array.size == 0:
        return jnp.zeros((), jnp.uint64)
    rows = array.reshape(-1, array.shape[-1] if array.ndim else 1)
    count, width = rows.shape
    each = min(max(1, BLOCK // width), count)

    def add(total: jax.Array, block: jax.Array) -> tuple[jax.Array, None]:
        # The last block is moved up; its rows that were counted before do not count again.
        first = jnp.minimum(block * each, count - each)
        # Turned into integers here, since doing that to all of it would be a copy.
        part = _unsigned(jax.lax.dynamic_slice_in_dim(rows, first, each))
        return total + _sum(part, first, block * each, words_a_row(array)), None

    blocks = jnp.arange(-(-count // each))
    return jax.lax.scan(add, jnp.zeros((), jnp.uint64), blocks)[0]


def _sum(rows: jax.Array, first: jax.Array, uncounted: jax.Array, wide: int) -> jax.Array:
    """What rows add, which are those from `first` on; those before `uncounted` add nothing."""
    iota, u = jax.lax.broadcasted_iota, jnp.uint64
    size = rows.dtype.itemsize
    values = rows.astype(u)
    # Elements stay apart, each shifted to its place in its word.
    column, each = iota(u, rows.shape, 1), 4 // size
    row = iota(u, rows.shape, 0) + first.astype(u)
    values = jnp.where(row >= uncounted.astype(u), values << (column % each * (8 * size)), u(0))
    index = row * wide + column // each
    near = _splitmix(index % TABLE) | np.uint64(1)
    far = _splitmix(index // TABLE + _FAR) | np.uint64(1)
    return jnp.sum(values * near * far, dtype=u)


def _unsigned(rows: jax.Array) -> jax.Array:
    if rows.dtype == jnp.bool_:
        return rows.astype(jnp.uint8)
    if rows.dtype.itemsize == 8:
        return jax.lax.bitcast_convert_type(rows, jnp.uint32).reshape(len(rows), -1)
    return jax.lax.bitcast_convert_type(rows, jnp.dtype(f"uint{8 * rows.dtype.itemsize}"))


# --- Trees ---------------------------------------------------------------------------------------

Digests = dict[str, str]
"""A parameter's plane -> 16 hexadecimal digits."""


def named(tree: Any) -> list[tuple[str, Any]]:
    """The planes of parameters with their dotted paths: `layers.attention.q`, and `.packed` and so
    on behind it where it is quantized."""
    found = jax.tree_util.tree_leaves_with_path(tree)
    return [
        (
            ".".join(
                str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path
            ),
            leaf,
        )
        for path, leaf in found
    ]


def of_host(tree: Any) -> Digests:
    """The digests of host arrays."""
    return {name: f"{host(array):016x}" for name, array in named(tree)}


def of_device(params: Any) -> dict[int, Digests]:
    """What the devices of this process hold: by rank (the place among the mesh's devices; 0
    without a mesh)."""
    found: dict[int, list[tuple[str, jax.Array]]] = {}
    for name, array in named(params):
        ranks = _ranks(array)
        for shard in array.addressable_shards:
            found.setdefault(ranks[shard.device], []).append((name, shard.data))
    return {
        rank: {
            name: f"{d:016x}"
            for (name, _), d in zip(held, device([a for _, a in held]), strict=True)
        }
        for rank, held in sorted(found.items())
    }


def _ranks(array: jax.Array) -> dict[Any, int]:
    mesh = getattr(array.sharding, "mesh", None)
    devices = array.sharding.device_set if mesh is None else mesh.devices.flat
    return {device: rank for rank, device in enumerate(devices)}


class Notes:
    """The digests of what a loader reads, while it reads."""

    def __init__(self) -> None:
        self._found: dict[int, dict[str, int]] = {}

    def whole(self, rank: int, path: str, tree: Any) -> None:
        """A parameter of a rank, as host arrays."""
        for name, array in named({path: tree}):
            self._add(rank, name, host(array))

    def rows(
        self, rank: int, path: str, tree: Any, plane: int, piece: np.ndarray, first: int
    ) -> None:
        """Some rows (along the last axis) of a parameter's plane.

        Args:
          tree: the parameter, of anything with the structure of its planes.
          plane: the plane's place among the leaves of `tree`.
          first: where the rows stand in the whole plane.
        """
        self._add(rank, named({path: tree})[plane][0], host(piece, first))

    def _add(self, rank: int, name: str, part: int) -> None:
        found = self._found.setdefault(rank, {})
        found[name] = (found.get(name, 0) + part) & _WHOLE

    def digests(self, ranks: Iterable[int]) -> dict[int, Digests]:
        """What each of these ranks should hold; what was read for one of them alone is not sharded
        and belongs to all."""
        ranks = list(ranks)
        shared = self._found.get(min(ranks), {}) if ranks else {}
        return {
            r: {n: f"{d:016x}" for n, d in {**shared, **self._found.get(r, {})}.items()}
            for r in ranks
        }


@dataclasses.dataclass(frozen=True)
class Seen:
    """Notes of one parameter of one rank."""

    notes: Notes
    rank: int
    path: str

    def whole(self, tree: Any) -> None:
        """See `Notes.whole`."""
        self.notes.whole(self.rank, self.path, tree)

    def rows(
        self, tree: Any, plane: int, piece: np.ndarray, first: int, rest: tuple[int, ...]
    ) -> None:
        """See `Notes.rows`.

        Args:
          piece: [rows, *rest[1:]], cut along the first axis of the members.
          first: the first of these among all members' rows.
          rest: the shape of a member of the plane.
        """
        if len(rest) < 2:
            width = rest[0] if rest else 1
            piece, first = piece.reshape(-1, width), first // width
        else:
            first *= math.prod(rest[1:-1])
        self.notes.rows(self.rank, self.path, tree, plane, piece, first)


def differences(read: Mapping[str, str], held: Mapping[str, str], rank: int) -> list[str]:
    """What a rank's device does not hold as it was read, in words."""
    return [
        f"rank {rank}: {name} is {held.get(name, 'missing')} on the device, {read[name]} was read"
        for name in sorted(read)
        if held.get(name) != read[name]
    ]


def disagreements(ranks: Mapping[int, Mapping[str, str]], replicated: set[str]) -> list[str]:
    """Where ranks differ in what all of them should hold alike, in words.

    The digest that most ranks have counts as the right one; where there is no majority, all are
    named.

    Args:
      ranks: digests by rank.
      replicated: names of parameters that are not sharded; their planes count, too.
    """
    wrong = []
    names = sorted({name for digests in ranks.values() for name in digests})
    for name in names:
        if not any(name == r or name.startswith(f"{r}.") for r in replicated):
            continue
        held = {rank: digests.get(name, "missing") for rank, digests in sorted(ranks.items())}
        kinds = sorted(set(held.values()), key=lambda d: -list(held.values()).count(d))
        if len(kinds) < 2:
            continue
        most = list(held.values()).count(kinds[0])
        if 2 * most > len(held):
            wrong += [
                f"rank {rank}: {name} is {d}, the other ranks have {kinds[0]}"
                for rank, d in held.items()
                if d != kinds[0]
            ]
        else:
            told = ", ".join(f"rank {rank} has {d}" for rank, d in held.items())
            wrong.append(f"{name}: {told}")
    return wrong


def require(problems: list[str], what: str) -> None:
    """Raises CheckpointError where there are differences; names the first ones."""
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise CheckpointError(f"{what}: {'; '.join(problems[:3])}{more}")
