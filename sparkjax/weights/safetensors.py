"""Reading safetensors files: the header is checked hard, the data is mapped, nothing is copied.

Format: 8 bytes little-endian header length, a JSON object name -> {dtype, shape, data_offsets},
then the data. https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import itertools
import json
import math
import mmap
import stat
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from .errors import CheckpointError

HEADER_LIMIT = 100 * 1000 * 1000
"""The largest header in bytes, as the format's own library has it."""

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}


MOST_AXES = 32


class TensorInfo(NamedTuple):
    """A tensor of a file: dtype, shape, and the absolute byte range of its data."""

    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """One mapped file.

    Attributes:
      path: of the file.
      bytes: the map, uint8 [size].
      tensors: TensorInfo by name.
      metadata: the header's own.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            if not stat.S_ISREG(path.stat().st_mode):
                # A pipe would keep us waiting for ever.
                raise CheckpointError(f"{path}: this is no regular file")
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise CheckpointError(f"{path}: this file is missing") from None
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
        except ValueError:
            raise CheckpointError(f"{path}: this file is empty") from None
        self.bytes = np.frombuffer(self._map, np.uint8)
        self.tensors, self.metadata = _header(path, self._map)

    def read(self, name: str) -> np.ndarray:
        """The tensor as a read-only view of the file."""
        info = self.tensors[name]
        return self.bytes[info.begin : info.end].view(info.dtype).reshape(info.shape)


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of a JSON text (an `object_pairs_hook`); raises ValueError if a key comes twice."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} occurs twice")
        found[name] = value
    return found


def _header(path: Path, data: mmap.mmap) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    size = len(data)
    if size < 8:
        raise CheckpointError(f"{path}: {size} bytes is too short for a safetensors file")
    length = int.from_bytes(data[:8], "little")
    if length > min(HEADER_LIMIT, size - 8):
        raise CheckpointError(
            f"{path}: the header says {length} bytes; the file allows {min(HEADER_LIMIT, size - 8)}"
        )
    try:
        header = json.loads(data[8 : 8 + length], object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is not valid JSON: {_first(error)}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is not a JSON object")
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(type(v) is str for v in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ is not an object of strings")
    start = 8 + length
    tensors = {name: _info(path, name, entry, start, size) for name, entry in header.items()}
    _no_overlap(path, tensors)
    return tensors, metadata


def _info(path: Path, name: str, entry: Any, start: int, size: int) -> TensorInfo:
    def fail(message: str) -> CheckpointError:
        return CheckpointError(f"{path}: tensor {name!r}: {message}")

    if not isinstance(entry, dict):
        raise fail("its header entry is not an object")
    kind = entry.get("dtype")
    dtype = DTYPES.get(kind) if isinstance(kind, str) else None
    if dtype is None:
        raise fail(f"dtype is {shown(kind)}; known: {', '.join(DTYPES)}")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")

    def counts(value: Any) -> bool:
        return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**48 for n in value)

    if not counts(shape):
        raise fail(f"shape is {shown(shape)}; allowed: a list of sizes")
    if len(shape) > MOST_AXES:
        raise fail(f"it has {len(shape)} axes; allowed: {MOST_AXES}")
    if not counts(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= size - start:
        raise fail(f"data_offsets are {shown(offsets)}; allowed: within 0 .. {size - start}")
    if math.prod(shape) * dtype.itemsize != offsets[1] - offsets[0]:
        raise fail(f"{offsets[1] - offsets[0]} bytes do not hold {entry['dtype']} {shape}")
    return TensorInfo(dtype, tuple(shape), start + offsets[0], start + offsets[1])


def shown(value: Any) -> str:
    """A value in a message, however long it is."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _first(error: Exception) -> str:
    return "it nests too deep" if isinstance(error, RecursionError) else str(error)[:200]


def _no_overlap(path: Path, tensors: dict[str, TensorInfo]) -> None:
    placed = sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end))
    for (name, info), (other, following) in itertools.pairwise(placed):
        if following.begin < info.end:
            raise CheckpointError(f"{path}: tensors {name!r} and {other!r} overlap")
