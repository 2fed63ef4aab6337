"""A rank's device-ready weights in one file, which the next start reads as they are.

Format (this project's own; integers are little-endian, blobs and the table begin on a page of
4,096 bytes):

    0   8 bytes   "SPARKIMG"
    8   u32       version, 1
    12  u32       0
    16  u64       offset of the table
    24  u64       bytes of the table
    32  32 bytes  SHA-256 of the table
    4096          blobs, one a plane, C order
    table         JSON: {"key": ..., "size": bytes of the file, "params": {path: entry}}

An entry is a plane {"dtype", "shape", "offset", "crc32"} or a node {"node": class, "fields": {name:
value}}, whose values are entries, lists of entries ("list") or static values ("value").

A file is written under another name and renamed when all of it is on disk, so whatever interrupts
the writer leaves the old file or none. The key says what the bytes were made from; a file with
another key, or one that is damaged, is not used and replaced.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import logging
import math
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import __version__
from ..models import params as declarations
from ..models.params import Tree
from . import formats
from .checkpoint import Checkpoint
from .direct import CHUNK, DIRECT, PAGE, pages, up
from .fingerprint import fingerprint
from .stream import Leaf, Planned

log = logging.getLogger(__name__)
MAGIC, VERSION = b"SPARKIMG", 1
HEADER = struct.Struct("<8sIIQQ32s")
TABLE_LIMIT = 1 << 30
"""The largest table in bytes."""


class Unusable(ValueError):
    """An image that is not what it should be; says why."""


def key_of(
    checkpoint: Checkpoint, tree: Tree, ranks: int, rank: int, facts: Mapping[str, Any]
) -> dict[str, Any]:
    """What a rank's device-ready bytes are made from.

    Args:
      facts: what else decides about them (the platform, for instance).
    """
    declared = hashlib.sha256()
    for path, param in declarations.leaves(tree):
        declared.update(f"{path} {param!r}\n".encode())
    config = json.dumps(checkpoint.config, sort_keys=True, default=str).encode()
    return {
        "sparkjax": __version__,
        "ranks": ranks,
        "rank": rank,
        "declarations": declared.hexdigest(),
        "config": hashlib.sha256(config).hexdigest(),
        "files": [[p.name, p.stat().st_mtime_ns, fingerprint(p)] for p, _ in checkpoint.files],
        **facts,
    }


def path_of(folder: Path, checkpoint: Checkpoint, ranks: int, rank: int) -> Path:
    """Where a rank's image of this checkpoint lies: one file, replaced when the key changes."""
    where = hashlib.sha256(str(checkpoint.path.absolute()).encode()).hexdigest()[:8]
    return folder / f"{checkpoint.path.name}-{where}-rank{rank}of{ranks}.img"


# --- Reading ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Image:
    """An opened image: its parameters as leaves over views of the mapped file."""

    path: Path
    mapped: np.ndarray
    leaves: dict[str, Leaf]


def open_image(path: Path, key: Mapping[str, Any], *, verify: bool = False) -> Image | None:
    """The image, or None where there is none that fits; says in the log why.

    Args:
      verify: compare every blob with its checksum; this reads all of it once more.
    """
    try:
        return read_image(path, key, verify=verify)
    except FileNotFoundError:
        return None
    except (OSError, Unusable) as error:
        log.warning("%s: this image is not used: %s", path, error)
        return None


def read_image(path: Path, key: Mapping[str, Any] | None, *, verify: bool = False) -> Image:
    """Opens and checks an image; `key` None takes any.

    Raises:
      Unusable: damaged, or made from something else.
      OSError: it cannot be read.
    """
    if path.stat().st_size < PAGE:
        raise Unusable("it is too short")
    mapped = np.memmap(path, np.uint8, "r")
    magic, version, _, offset, length, digest = HEADER.unpack(mapped[: HEADER.size].tobytes())
    if magic != MAGIC or version != VERSION:
        raise Unusable(f"it does not begin with {MAGIC!r} and version {VERSION}")
    if length > TABLE_LIMIT or offset + length > mapped.size:
        raise Unusable("its table lies outside of the file")
    text = mapped[offset : offset + length].tobytes()
    if hashlib.sha256(text).digest() != digest:
        raise Unusable("its table is damaged")
    try:
        table = json.loads(text)
        if table["size"] != mapped.size:
            raise Unusable(f"it has {mapped.size} bytes; written were {table['size']}")
        if key is not None and table["key"] != json.loads(json.dumps(key)):
            changed = [k for k in {*table["key"], *key} if table["key"].get(k) != key.get(k)]
            raise Unusable(f"it was made from another {', '.join(sorted(changed))}")
        flat = np.asarray(mapped)
        leaves = {
            name: Leaf(_entry(entry, flat, verify), True, ())
            for name, entry in table["params"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, Unusable):
            raise
        raise Unusable(f"its table is not understood: {error!r}") from None
    return Image(path, flat, leaves)


def _entry(entry: Any, mapped: np.ndarray, verify: bool) -> Any:
    if entry is None:
        return None
    if "dtype" in entry:
        return _plane(entry, mapped, verify)
    kinds = _classes()
    if entry["node"] not in kinds:
        raise Unusable(f"it holds a {entry['node']!r}")
    fields: dict[str, Any] = {}
    for name, value in entry["fields"].items():
        if "value" in value:
            fields[name] = _tuples(value["value"])
        elif "list" in value:
            fields[name] = tuple(_entry(e, mapped, verify) for e in value["list"])
        else:
            fields[name] = _entry(value.get("entry"), mapped, verify)
    return kinds[entry["node"]](**fields)


def _plane(entry: dict[str, Any], mapped: np.ndarray, verify: bool) -> Planned:
    dtype, shape = np.dtype(jnp.dtype(entry["dtype"])), tuple(map(int, entry["shape"]))
    offset, nbytes = int(entry["offset"]), math.prod(shape) * dtype.itemsize
    if offset % PAGE or offset < PAGE or nbytes < 0 or offset + nbytes > mapped.size:
        raise Unusable(f"a plane of {nbytes} bytes at {offset} lies outside of the file")
    raw = mapped[offset : offset + nbytes]
    if verify and zlib.crc32(raw.data) != entry["crc32"]:
        raise Unusable(f"the plane at {offset} is damaged")
    # As rows, so that a device is filled in pieces however many experts a layer has.
    rows = raw.view(dtype).reshape(-1, shape[-1]) if len(shape) > 1 and nbytes else raw.view(dtype)
    return Planned(shape, dtype, [rows])


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value


def _classes() -> dict[str, type]:
    """Every weight format by its class's name."""
    found: dict[str, type] = {}
    waiting: list[Any] = [formats.QuantizedTensor]
    while waiting:
        kinds = waiting.pop().__subclasses__()
        found |= {kind.__name__: kind for kind in kinds}
        waiting += kinds
    return found


# --- Writing ------------------------------------------------------------------------------------


def save(
    path: Path,
    key: Mapping[str, Any],
    params: Mapping[str, Any],
    advance: Callable[[int], None] = lambda nbytes: None,
) -> bool:
    """Writes an image where there is room for it; a failure is a line in the log, no more.

    Returns:
      Whether the image is there now.
    """
    try:
        write_image(path, key, params, advance)
    except OSError as error:
        log.warning("%s: no image is written: %s", path, error.strerror or error)
        return False
    return True


def write_image(
    path: Path,
    key: Mapping[str, Any],
    params: Mapping[str, Any],
    advance: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """Writes an image, and publishes it when it is durable.

    Args:
      params: arrays or nodes (of one rank) by dotted path.
      advance: told of bytes that have been written.

    Raises:
      OSError: no room, or the folder cannot be written to; nothing is left behind then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _sweep(path)
    needed = sum(up(a.nbytes) for a in jax.tree.leaves(dict(params))) + 2 * PAGE
    status = os.statvfs(path.parent)
    if status.f_bavail * status.f_frsize < needed:
        room = status.f_bavail * status.f_frsize / 2**30
        raise OSError(
            errno.ENOSPC, f"{needed / 2**30:.2f} GiB are needed, {room:.2f} GiB are free"
        )
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        writer = _Writer(temporary, advance)
        try:
            entries = {name: _describe(value, writer) for name, value in params.items()}
            offset = writer.at
            text = _text(key, entries, offset)
            writer.blob([np.frombuffer(text, np.uint8)])
        finally:
            writer.close()
        os.ftruncate(fd, offset + len(text))
        digest = hashlib.sha256(text).digest()
        head = HEADER.pack(MAGIC, VERSION, 0, offset, len(text), digest)
        # The header last: without it the file is nobody's image, whatever its name.
        os.fsync(fd)
        os.pwrite(fd, head, 0)
        os.fsync(fd)
        temporary.replace(path)
        _sync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    finally:
        os.close(fd)


def _text(key: Mapping[str, Any], entries: Mapping[str, Any], offset: int) -> bytes:
    """The table, in which the size of the file stands, which is that of the table too."""
    size, text = 0, b""
    while offset + len(text) != size or not text:
        size = offset + len(text)
        table = {"key": key, "size": size, "params": entries}
        text = json.dumps(table, separators=(",", ":")).encode()
        # Blanks keep the length where the number of digits changes.
        text = text.ljust(size - offset)
    return text


def _sweep(path: Path) -> None:
    """Removes what writers of this image left behind that are no more."""
    for left in path.parent.glob(f".{path.name}.*.tmp"):
        with contextlib.suppress(OSError):
            fd = os.open(left, os.O_RDWR)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                left.unlink()
            finally:
                os.close(fd)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _describe(value: Any, writer: _Writer) -> Any:
    """The table's entry of an array or node, whose planes are written."""
    if value is None:
        return None
    if not formats.is_quantized(value):
        offset = writer.at
        crc = writer.blob(_bytes(value))
        dtype = jnp.dtype(value.dtype).name
        return {"dtype": dtype, "shape": list(value.shape), "offset": offset, "crc32": crc}
    fields = {}
    for field in dataclasses.fields(value):
        held = getattr(value, field.name)
        if not field.metadata.get("pytree_node", True):
            fields[field.name] = {"value": held}
        elif isinstance(held, tuple):
            fields[field.name] = {"list": [_describe(v, writer) for v in held]}
        else:
            fields[field.name] = {"entry": _describe(held, writer)}
    return {"node": type(value).__name__, "fields": fields}


def _bytes(array: Any) -> Iterator[np.ndarray]:
    """An array's bytes in pieces; of a device's, never much of it at a time."""
    if array.nbytes > 8 * CHUNK and array.ndim and not _on_host(array):
        for i in range(array.shape[0]):
            yield from _bytes(array[i])
        return
    yield np.ascontiguousarray(np.asarray(array)).reshape(-1).view(np.uint8)


def _on_host(array: Any) -> bool:
    if isinstance(array, np.ndarray):
        return True
    return all(device.platform == "cpu" for device in array.devices())


class _Writer:
    """Appends blobs, each from a page on, through one aligned buffer; past the page cache where
    the file system allows that."""

    def __init__(self, path: Path, advance: Callable[[int], None]):
        self._advance = advance
        self._buffer = pages(CHUNK)[:CHUNK]
        self._used = 0
        self._start = PAGE
        try:
            self._fd = os.open(path, os.O_WRONLY | DIRECT)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
            self._fd = os.open(path, os.O_WRONLY)

    @property
    def at(self) -> int:
        """Where the next blob begins."""
        return self._start + self._used

    def blob(self, parts: Any) -> int:
        """Appends bytes, filled up with zeros to a page; returns their CRC-32."""
        crc = 0
        for part in parts:
            crc = zlib.crc32(part.data, crc)
            done = 0
            while done < len(part):
                count = min(CHUNK - self._used, len(part) - done)
                self._buffer[self._used : self._used + count] = part[done : done + count]
                self._used += count
                done += count
                if self._used == CHUNK:
                    self._flush()
        fill = up(self._used) - self._used
        self._buffer[self._used : self._used + fill] = 0
        self._used += fill
        if self._used == CHUNK:
            self._flush()
        return crc

    def _flush(self) -> None:
        done = 0
        while done < self._used:
            done += os.pwrite(self._fd, self._buffer.data[done : self._used], self._start + done)
        self._start += self._used
        self._advance(self._used)
        self._used = 0

    def close(self) -> None:
        try:
            self._flush()
        finally:
            os.close(self._fd)
