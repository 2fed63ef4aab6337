"""A checkpoint as it lies on disk: its config, and its tensors under Hugging Face names."""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from . import gguf_models
from .detect import Stored, activation_tensors, detect
from .errors import CheckpointError
from .formats.gguf import gguf_tensor
from .gguf import GGUFFile
from .safetensors import SafetensorsFile, shown, unique

INDEX = "model.safetensors.index.json"
MODELOPT = "hf_quant_config.json"
JSON_LIMIT = 100 * 1000 * 1000
"""The largest JSON file of a checkpoint in bytes, as for a safetensors header."""


class Checkpoint(Protocol):
    """Where parameters come from.

    Attributes:
      path: the directory or file.
      config: the keys of config.json.
      names: every tensor, under its Hugging Face name.
      quantized: what makes up each quantized weight, by the name of the plain one.
      unread: tensors of `names` that belong to quantized activations.
      files: path and map (uint8 [size]) of every file that tensors are views of.
    """

    path: Path
    config: dict[str, Any]
    names: frozenset[str]
    quantized: Mapping[str, Stored]
    unread: frozenset[str]
    files: list[tuple[Path, np.ndarray]]

    def weight(self, name: str, *, check: bool = True) -> Any:
        """The weight of this name: an array, or a QuantizedTensor over views of the file.

        Args:
          check: refuse scales that are not numbers; this reads them.
        """

    def read(self, name: str) -> np.ndarray:
        """The stored array: a view where the file allows it. Quantized GGUF tensors are uint8
        [..., N, row bytes]."""

    def kind(self, name: str) -> str | None:
        """The GGUF block type of a quantized tensor, else None."""


class Directory:
    """A directory with config.json and one or more safetensors files.

    Attributes:
      share: (rank, ranks) where the files hold only what this rank reads.
    """

    def __init__(self, path: Path):
        self.path = path
        self.config = read_json(path / "config.json")
        record = _record(path)
        self.share = record.share if record is not None else None
        opened, self._where = _open_files(path)
        self.files = [(file.path, file.bytes) for file in opened]
        self.names = frozenset(self._where)
        index = path / INDEX
        self.metadata: dict[str, Any] = {}
        if index.exists():
            metadata = read_json(index).get("metadata")
            self.metadata = metadata if isinstance(metadata, dict) else {}
        if self.metadata.get("tp_size") is not None:
            # How many slices fused rows are stored in: part of the layout, beside the config.
            self.config["checkpoint_shards"] = _whole(self.metadata["tp_size"])
        tensors = {n: (f.tensors[n].dtype, f.tensors[n].shape) for n, f in self._where.items()}
        self.quantized: Mapping[str, Stored] = detect(tensors, self._quantization())
        self.unread = frozenset(activation_tensors(tensors) if self.quantized else ())

    def _quantization(self) -> dict[str, Any]:
        """The config, with the quantization section that older ModelOpt files put beside it."""
        beside = self.path / MODELOPT
        if "quantization_config" in self.config or not beside.exists():
            return self.config
        return {**self.config, **read_json(beside)}

    def weight(self, name: str, *, check: bool = True) -> Any:
        """See `Checkpoint`.

        Raises:
          CheckpointError: a quantized weight that cannot be read.
        """
        if name not in self.quantized:
            return self.read(name)
        try:
            return self.quantized[name].build(self.read, check=check)
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {error}") from None

    def read(self, name: str) -> np.ndarray:
        return self._where[name].read(name)

    def kind(self, name: str) -> str | None:
        return None


def _whole(value: Any) -> Any:
    """A count that some writers put in quotes."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


class GGUF:
    """A .gguf file of an architecture that `gguf_models` describes."""

    def __init__(self, path: Path):
        self.path = path
        self.file = GGUFFile.open(path)
        self.files = self.file.files
        self.config, self._sources = gguf_models.describe(self.file)
        self.names = frozenset(self._sources)
        self.quantized: Mapping[str, Stored] = {}
        self.unread: frozenset[str] = frozenset()

    def weight(self, name: str, *, check: bool = True) -> Any:
        """See `Checkpoint`.

        Raises:
          CheckpointError: a type without a decoder.
        """
        kind = self.kind(name)
        array = self.read(name)
        if kind is None:
            return array
        try:
            return gguf_tensor(array, kind)
        except CheckpointError as error:
            held = self._sources[name].name
            raise CheckpointError(f"{self.path}: tensor {held!r}: {error}") from None

    def read(self, name: str) -> np.ndarray:
        return gguf_models.read_source(self.file, self._sources[name])

    def kind(self, name: str) -> str | None:
        kind = self.file.tensors[self._sources[name].name].kind
        return None if kind in ("F32", "F16", "BF16", "F64") else kind


def tensors_of(checkpoint: Checkpoint, name: str) -> tuple[str, ...]:
    """The tensors of the files that hold the weight of this name; none where it is absent."""
    stored = checkpoint.quantized.get(name)
    if stored is not None:
        return stored.tensors
    return (name,) if name in checkpoint.names else ()


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Opens a directory of safetensors files, one that was exported, or a .gguf file.

    Raises:
      CheckpointError: nothing there, or not a checkpoint.
    """
    path = Path(path)
    if path.is_dir():
        from .exported import FACTS, Exported

        return Exported(path) if (path / FACTS).exists() else Directory(path)
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or directory")
    if path.suffix == ".gguf":
        return GGUF(path)
    raise CheckpointError(f"{path}: expected a directory with config.json, or a .gguf file")


def read_json(path: Path) -> dict[str, Any]:
    """The object of a JSON file.

    Raises:
      CheckpointError: no file, too large, not JSON, a key twice, or not an object.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path}: this is no regular file")
        if status.st_size > JSON_LIMIT:
            raise CheckpointError(f"{path}: {status.st_size} bytes; allowed: {JSON_LIMIT}")
        value = json.loads(path.read_bytes(), object_pairs_hook=unique)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except RecursionError:
        raise CheckpointError(f"{path}: not valid JSON: it nests too deep") from None
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return value


def _open_files(path: Path) -> tuple[list[SafetensorsFile], Mapping[str, SafetensorsFile]]:
    index = path / INDEX
    if not index.exists():
        single = path / "model.safetensors"
        if not single.exists():
            raise CheckpointError(f"{path}: neither model.safetensors nor {INDEX} is there")
        file = SafetensorsFile(_inside(path, single.name))
        return [file], dict.fromkeys(file.tensors, file)
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map is missing")
    record = _record(path)
    # Files that were left out, since none of their tensors is ever read.
    left_out = frozenset(record.left_out if record is not None else ())
    # What is no name is told below.
    weight_map = {n: s for n, s in weight_map.items() if not _plain(s) or s not in left_out}
    files: dict[str, SafetensorsFile] = {}
    where: dict[str, SafetensorsFile] = {}
    missing = sorted(
        {s for s in weight_map.values() if _plain(s) and not (path / s).exists()}
    )
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise CheckpointError(f"{path}: missing files: {', '.join(missing[:3])}{more}")
    for name, shard in weight_map.items():
        if not _plain(shard):
            raise CheckpointError(
                f"{index}: {name!r} names file {shown(shard)}; allowed: a plain name"
            )
        if shard not in files:
            files[shard] = SafetensorsFile(_inside(path, shard))
        if name not in files[shard].tensors:
            raise CheckpointError(f"{path / shard}: tensor {name!r} is missing")
        where[name] = files[shard]
    return list(files.values()), where


def _record(path: Path) -> Any:
    """What `sparkjax pull` wrote down of a folder, None where it did not."""
    from ..fetch.errors import FetchError
    from ..fetch.store import read_record

    try:
        return read_record(path)
    except FetchError as error:
        raise CheckpointError(str(error)) from None


def _plain(name: Any) -> bool:
    """Whether this is the name of a file in the folder, and of nothing else."""
    return (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and "\0" not in name
        and Path(name).name == name
    )


def _inside(folder: Path, name: str) -> Path:
    """A file of a folder. A link may lead within the folder, or from a snapshot of the hub's cache
    to its blobs.

    Raises:
      CheckpointError: it leads elsewhere.
    """
    file, home = folder / name, folder.resolve()
    try:
        target = file.resolve(strict=True)
    except (OSError, RuntimeError):
        return file  # missing, or a circle of links: reading it says so
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    if not target.is_relative_to(home) and not target.is_relative_to(blobs):
        raise CheckpointError(f"{file}: this link leads out of the folder, to {target}")
    return file
