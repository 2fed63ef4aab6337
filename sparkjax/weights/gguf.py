"""GGUF files: metadata and tensors, read through a memory map.

A file is a header, key-value metadata, a table of tensors, and aligned tensor data, all
little-endian (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). Everything in it is
checked against the size of the file before it is believed: a count or a length in a hostile file
can make this module raise, but never allocate or read out of bounds.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from sparkjax.weights.errors import CheckpointError


class GGMLType(NamedTuple):
    """One storage type: `elements` weights of a row are stored in `nbytes` bytes.

    `dtype` is the numpy type of a plain array, None for a quantized block.
    """

    name: str
    elements: int
    nbytes: int
    dtype: Any = None


# ggml's enum ggml_type with its block sizes. Types without a decoder are listed too, so that
# an error can name them.
GGML_TYPES: dict[int, GGMLType] = {
    0: GGMLType("F32", 1, 4, np.dtype("<f4")),
    1: GGMLType("F16", 1, 2, np.dtype("<f2")),
    2: GGMLType("Q4_0", 32, 18),
    3: GGMLType("Q4_1", 32, 20),
    6: GGMLType("Q5_0", 32, 22),
    7: GGMLType("Q5_1", 32, 24),
    8: GGMLType("Q8_0", 32, 34),
    9: GGMLType("Q8_1", 32, 40),
    10: GGMLType("Q2_K", 256, 84),
    11: GGMLType("Q3_K", 256, 110),
    12: GGMLType("Q4_K", 256, 144),
    13: GGMLType("Q5_K", 256, 176),
    14: GGMLType("Q6_K", 256, 210),
    15: GGMLType("Q8_K", 256, 292),
    16: GGMLType("IQ2_XXS", 256, 66),
    17: GGMLType("IQ2_XS", 256, 74),
    18: GGMLType("IQ3_XXS", 256, 98),
    19: GGMLType("IQ1_S", 256, 50),
    20: GGMLType("IQ4_NL", 32, 18),
    21: GGMLType("IQ3_S", 256, 110),
    22: GGMLType("IQ2_S", 256, 82),
    23: GGMLType("IQ4_XS", 256, 136),
    24: GGMLType("I8", 1, 1, np.dtype("<i1")),
    25: GGMLType("I16", 1, 2, np.dtype("<i2")),
    26: GGMLType("I32", 1, 4, np.dtype("<i4")),
    27: GGMLType("I64", 1, 8, np.dtype("<i8")),
    28: GGMLType("F64", 1, 8, np.dtype("<f8")),
    29: GGMLType("IQ1_M", 256, 56),
    30: GGMLType("BF16", 1, 2, np.dtype(ml_dtypes.bfloat16)),
    34: GGMLType("TQ1_0", 256, 54),
    35: GGMLType("TQ2_0", 256, 66),
    39: GGMLType("MXFP4", 32, 17),
    40: GGMLType("NVFP4", 64, 36),
    41: GGMLType("Q1_0", 128, 18),
}

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS: dict[int, np.dtype] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    _BOOL: np.dtype("<u1"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_MAX_ARRAY_DEPTH = 4
_MAX_DIMS = 4  # GGML_MAX_DIMS
_DEFAULT_ALIGNMENT = 32
# The fewest bytes that one entry can take: bounds a count before anything is built for it.
_MIN_KV_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8
_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")

_u32 = struct.Struct("<I").unpack_from
_u64 = struct.Struct("<Q").unpack_from


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies.

    Attributes:
      name: the tensor's name in the file.
      kind: ggml type name, e.g. "Q4_1" or "F32".
      shape: logical shape in numpy order [..., N, K] (the reverse of ggml's dims): rows of K
        weights, K innermost.
      offset: absolute byte offset in its file.
      nbytes: bytes of data.
      dtype: numpy dtype of a plain array, None for a quantized type.
      part: index of the file of a split checkpoint.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    dtype: Any = None
    part: int = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of K weights."""
        return self.nbytes // int(np.prod(self.shape[:-1], dtype=object))


@dataclass(frozen=True)
class GGUFFile:
    """An open GGUF checkpoint (one file, or all files of a split one).

    Attributes:
      path: the (first) file.
      version: 2 or 3.
      alignment: of the tensor data.
      metadata: key to int, float, bool, str, list of str, numpy array, or list of arrays.
      tensors: name to TensorInfo, in file order.
      paths: of all files.
    """

    path: Path
    version: int
    alignment: int
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    paths: tuple[Path, ...]
    _maps: tuple[np.ndarray, ...] = field(repr=False)

    @classmethod
    def open(cls, path: str | Path) -> GGUFFile:
        """Maps and checks a file. The map lives as long as this object or a view of it.

        The first file of a split checkpoint (`NAME-00001-of-0000N.gguf`) opens all of them.

        Raises:
          CheckpointError: the file is not a well-formed GGUF file of version 2 or 3.
          OSError: it cannot be opened.
        """
        first = _read_part(Path(path), 0)
        count = first.metadata.get("split.count", 1)
        if count == 1:
            return first
        parts = [first, *(_read_part(p, i) for i, p in _other_parts(first, count))]
        return _join(parts)

    @property
    def files(self) -> list[tuple[Path, np.ndarray]]:
        """Every file's path and its map, uint8 [size]."""
        return list(zip(self.paths, self._maps, strict=True))

    def read(self, name: str, rows: slice | np.ndarray | None = None) -> np.ndarray:
        """The stored values of a tensor, all of it or some rows.

        Args:
          name: a key of `tensors`.
          rows: which rows (the axis before the last one; the only axis of a vector). A slice
            gives a view of the map, an index array a copy. Rows of quantized tensors are
            independent, so any choice of rows is exact.

        Returns:
          For a quantized type a uint8 array [..., N, row_bytes]; for a plain type an array of
          that dtype (BF16 is ml_dtypes.bfloat16) with the logical shape. Read-only.

        Raises:
          KeyError: no such tensor.
          IndexError: a row index that is out of range.
        """
        info = self.tensors[name]
        raw = self._maps[info.part][info.offset : info.offset + info.nbytes]
        if info.dtype is None:
            values = raw.reshape(*info.shape[:-1], info.row_bytes)
        else:
            values = raw.view(info.dtype).reshape(info.shape)
        if rows is None:
            return values
        return values[rows] if values.ndim == 1 else values[..., rows, :]


class _Cursor:
    """Reads forward through the file; every step is checked against its end."""

    def __init__(self, path: Path, data: mmap.mmap, size: int):
        self.path, self.data, self.size, self.pos = path, data, size, 0

    def fail(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {message}")

    def need(self, nbytes: int, what: str) -> None:
        left = self.size - self.pos
        if nbytes > left:
            raise self.fail(
                f"{what} needs {nbytes} bytes at offset {self.pos}, but only {left} are left: "
                "the file is truncated or corrupt"
            )

    def u32(self, what: str) -> int:
        self.need(4, what)
        (value,) = _u32(self.data, self.pos)
        self.pos += 4
        return value

    def u64(self, what: str) -> int:
        self.need(8, what)
        (value,) = _u64(self.data, self.pos)
        self.pos += 8
        return value

    def string(self, what: str) -> str:
        return self.strings(1, what)[0]

    def strings(self, count: int, what: str) -> list[str]:
        # One tight loop: a vocabulary has several hundred thousand strings.
        self.need(8 * count, f"{what} ({count} strings)")
        data, size, pos = self.data, self.size, self.pos
        out: list[str] = []
        try:
            for _ in range(count):
                (length,) = _u64(data, pos)
                start = pos + 8
                pos = start + length
                if pos > size:
                    raise self.fail(
                        f"{what}: string {len(out)} is {length} bytes long, but only "
                        f"{size - start} are left: the file is truncated or corrupt"
                    )
                out.append(str(data[start:pos], "utf-8"))
        except UnicodeDecodeError as error:
            raise self.fail(f"{what}: string {len(out)} is not UTF-8: {error.reason}") from None
        except struct.error:
            raise self.fail(f"{what}: the file ends after {len(out)} of {count} strings") from None
        self.pos = pos
        return out

    def numbers(self, kind: int, count: int, what: str) -> np.ndarray:
        dtype = _SCALARS[kind]
        self.need(count * dtype.itemsize, f"{what} ({count} values)")
        values = np.frombuffer(self.data, dtype, count, self.pos).copy()
        self.pos += count * dtype.itemsize
        if kind != _BOOL:
            return values
        if values.size and values.max() > 1:
            raise self.fail(f"{what} is a bool of value {values.max()}; allowed: 0, 1")
        return values.astype(bool)

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string(what)
        if kind in _SCALARS:
            return self.numbers(kind, 1, what)[0].item()
        if kind != _ARRAY:
            raise self.fail(f"{what} has value type {kind}; allowed: 0 to 12")
        if depth == _MAX_ARRAY_DEPTH:
            raise self.fail(f"{what} nests arrays deeper than {_MAX_ARRAY_DEPTH}")
        item = self.u32(f"{what} array type")
        count = self.u64(f"{what} array length")
        if item == _STRING:
            return self.strings(count, what)
        if item in _SCALARS:
            return self.numbers(item, count, what)
        self.need(12 * count, f"{what} ({count} arrays)")
        return [self.value(item, what, depth + 1) for _ in range(count)]


def _read_part(path: Path, part: int) -> GGUFFile:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if size < 24:
            raise CheckpointError(f"{path}: {size} bytes; a GGUF header alone has 24")
        data = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    cursor = _Cursor(path, data, size)
    version, tensor_count, kv_count = _header(cursor)
    metadata = _metadata(cursor, kv_count)
    alignment = _alignment(cursor, metadata)
    tensors = _tensors(cursor, tensor_count, alignment, part)
    return GGUFFile(
        path, version, alignment, metadata, tensors, (path,), (np.frombuffer(data, np.uint8, size),)
    )


def _header(c: _Cursor) -> tuple[int, int, int]:
    magic = c.data[:4]
    if magic != b"GGUF":
        raise c.fail(f"magic is {magic!r}; a GGUF file starts with b'GGUF'")
    c.pos = 4
    version = c.u32("version")
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        hint = " (a big-endian file)" if swapped in (2, 3) else ""
        raise c.fail(f"version is {version}{hint}; allowed: 2 and 3, little-endian")
    tensors, kvs = c.u64("tensor count"), c.u64("metadata count")
    c.need(kvs * _MIN_KV_BYTES, f"metadata count {kvs}")
    c.need(tensors * _MIN_TENSOR_BYTES, f"tensor count {tensors}")
    return version, tensors, kvs


def _metadata(c: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for i in range(count):
        key = c.string(f"metadata key {i}")
        if key in metadata:
            raise c.fail(f"metadata key {key!r} appears twice")
        metadata[key] = c.value(c.u32(f"type of {key!r}"), repr(key))
    return metadata


def _alignment(c: _Cursor, metadata: dict[str, Any]) -> int:
    value = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(value, int) or value < 1 or value & (value - 1):
        raise c.fail(f"general.alignment is {value!r}; allowed: a power of two")
    return value


def _tensors(c: _Cursor, count: int, alignment: int, part: int) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for i in range(count):
        info = _tensor_info(c, i, alignment, part)
        if info.name in tensors:
            raise c.fail(f"tensor {info.name!r} appears twice")
        tensors[info.name] = info
    # Offsets in the table count from the start of the data, which is known only now.
    start = -(-c.pos // alignment) * alignment
    placed = {
        name: TensorInfo(name, t.kind, t.shape, start + t.offset, t.nbytes, t.dtype, part)
        for name, t in tensors.items()
    }
    _check_places(c, placed)
    return placed


def _tensor_info(c: _Cursor, index: int, alignment: int, part: int) -> TensorInfo:
    name = c.string(f"name of tensor {index}")
    what = f"tensor {name!r}"
    ndim = c.u32(f"{what} n_dims")
    if not 1 <= ndim <= _MAX_DIMS:
        raise c.fail(f"{what} has {ndim} dimensions; allowed: 1 to {_MAX_DIMS}")
    dims = tuple(c.u64(f"{what} dims") for _ in range(ndim))
    if min(dims) < 1:
        raise c.fail(f"{what} has dims {dims}; every one must be at least 1")
    kind = c.u32(f"{what} type")
    if kind not in GGML_TYPES:
        known = ", ".join(f"{i} {t.name}" for i, t in GGML_TYPES.items())
        raise c.fail(f"{what} has ggml type {kind}; known: {known}")
    ggml = GGML_TYPES[kind]
    if dims[0] % ggml.elements:
        raise c.fail(
            f"{what} has rows of {dims[0]} weights; {ggml.name} needs a multiple of {ggml.elements}"
        )
    offset = c.u64(f"{what} offset")
    if offset % alignment:
        raise c.fail(f"{what} has offset {offset}; it must be a multiple of {alignment}")
    nbytes = ggml.nbytes
    for extent in (dims[0] // ggml.elements, *dims[1:]):
        nbytes *= extent
    return TensorInfo(name, ggml.name, dims[::-1], offset, nbytes, ggml.dtype, part)


def _check_places(c: _Cursor, tensors: dict[str, TensorInfo]) -> None:
    previous = None
    for info in sorted(tensors.values(), key=lambda t: t.offset):
        end = info.offset + info.nbytes
        if end > c.size:
            raise c.fail(
                f"tensor {info.name!r} ({info.kind} {list(info.shape)}) ends at byte {end}, "
                f"but the file has {c.size}: the file is truncated or corrupt"
            )
        if previous and info.offset < previous.offset + previous.nbytes:
            raise c.fail(f"tensors {previous.name!r} and {info.name!r} overlap")
        previous = info


def _other_parts(first: GGUFFile, count: Any) -> list[tuple[int, Path]]:
    match = _SPLIT.search(first.path.name)
    if not match or int(match[1]) != 1 or int(match[2]) != count:
        raise CheckpointError(
            f"{first.path}: split.count is {count!r}, so the file must be named "
            "NAME-00001-of-0000N.gguf and be the first of its parts"
        )
    stem = first.path.name[: match.start()]
    return [
        (i, first.path.with_name(f"{stem}-{i + 1:05d}-of-{count:05d}.gguf"))
        for i in range(1, count)
    ]


def _join(parts: list[GGUFFile]) -> GGUFFile:
    first, tensors = parts[0], dict(parts[0].tensors)
    for i, part in enumerate(parts[1:], 1):
        if part.metadata.get("split.no") != i:
            raise CheckpointError(
                f"{part.path}: split.no is {part.metadata.get('split.no')!r}; expected {i}"
            )
        for name, info in part.tensors.items():
            if name in tensors:
                raise CheckpointError(f"{part.path}: tensor {name!r} is in an earlier part too")
            tensors[name] = info
    total = first.metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise CheckpointError(
            f"{first.path}: split.tensors.count is {total}, but the parts hold {len(tensors)}"
        )
    maps = tuple(m for part in parts for m in part._maps)
    paths = tuple(part.path for part in parts)
    return GGUFFile(
        first.path, first.version, first.alignment, first.metadata, tensors, paths, maps
    )
