"""Fetched checkpoints on disk.

    FOLDER/ORG--NAME/COMMIT/           the files of one commit, under their own names
    FOLDER/ORG--NAME/COMMIT/.pull.json what they should be, and which of them were verified
    FOLDER/ORG--NAME/COMMIT.1of4/      the share of rank 1 of 4 (see `partial`)
    FOLDER/ORG--NAME/refs/REVISION     the commit that a branch or tag stood for when it was pulled

A file gets its own name only when it is whole and its hash is right; until then it is NAME.part.
Records are replaced in one step, so that a crash leaves the old or the new one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from . import hashes
from .errors import FetchError
from .source import COMMIT, Source

RECORD = ".pull.json"
LOCK = ".lock"
PART = ".part"


class File(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a commit.

    Attributes:
      name: in the repository, with slashes.
      size: bytes.
      kind, hash: as the hub publishes it (see `hashes`).
    """

    name: str
    size: int
    kind: str
    hash: str

    def __post_init__(self) -> None:
        check_name(self.name)
        if self.kind not in hashes.KINDS or not re.fullmatch(r"[0-9a-f]{40,64}", self.hash):
            raise FetchError(f"file {self.name!r}: unknown hash {self.kind} {self.hash!r}")
        if self.size < 0:
            raise FetchError(f"file {self.name!r}: a size of {self.size} bytes")


class Record(msgspec.Struct, kw_only=True):
    """What a pulled folder holds.

    Attributes:
      repository, commit: where it comes from.
      files: what was asked for; [] until that is known.
      verified: name -> [size, time of change in ns] of files whose hash was right.
      left_out: weight files that were not asked for (see `select`).
      share: [rank, ranks] of a share, None for whole files.
      parts: name -> the ranges that a share has of a file, each with its SHA-256.
    """

    repository: str
    commit: str
    files: list[File]
    verified: dict[str, tuple[int, int]] = {}
    left_out: list[str] = []
    share: tuple[int, int] | None = None
    parts: dict[str, list[tuple[int, int, str]]] = {}


def check_name(name: str) -> None:
    """Raises FetchError unless a file of this name lies inside its folder."""
    parts = name.split("/")
    bad = any(p in ("", ".", "..") or p.startswith(".pull") for p in parts)
    if bad or "\\" in name or "\0" in name or parts[-1].endswith(PART) or parts[-1] == LOCK:
        raise FetchError(f"file name {name!r} is not allowed")


class Store:
    """The folder of all pulled checkpoints."""

    def __init__(self, folder: Path):
        self.folder = folder

    def repository(self, repository: str) -> Path:
        """Where the commits of ORG/NAME lie."""
        return self.folder / repository.replace("/", "--")

    def commit(self, repository: str, commit: str) -> Path:
        """Where the files of one commit lie."""
        if not COMMIT.fullmatch(commit):
            raise FetchError(f"{repository}: commit {commit!r}; allowed: 40 hexadecimal digits")
        return self.repository(repository) / commit

    def share(self, repository: str, commit: str, rank: int, ranks: int) -> Path:
        """Where the share of one rank of a commit lies."""
        return self.commit(repository, commit).with_name(f"{commit}.{rank}of{ranks}")

    def shares(self, repository: str, commit: str) -> list[Path]:
        """All shares of a commit, finished or not."""
        folder = self.repository(repository)
        found = folder.iterdir() if folder.is_dir() else ()
        return sorted(p for p in found if re.fullmatch(rf"{commit}\.\d+of\d+", p.name))

    def resolve(self, source: Source) -> str | None:
        """The pulled commit that a source means, as far as is known here.

        Raises:
          FetchError: a source without a revision, and several commits none of which is main.
        """
        folder = self.repository(source.repository)
        revision = source.revision or "main"
        if COMMIT.fullmatch(revision):
            here = (folder / revision).is_dir() or self.shares(source.repository, revision)
            return revision if here else None
        ref = folder / "refs" / quote(revision, safe="")
        if ref.is_file():
            return ref.read_text().strip()
        commits = self.commits(source.repository)
        if re.fullmatch(r"[0-9a-f]{7,39}", revision):
            commits = [c for c in commits if c.startswith(revision)]
        elif source.revision is not None:
            return None
        if len(commits) > 1:
            raise FetchError(f"{source} may mean {' or '.join(commits)}; name one with @REVISION")
        return commits[0] if commits else None

    def commits(self, repository: str) -> list[str]:
        """All pulled commits of a repository, finished or not."""
        folder = self.repository(repository)
        found = folder.iterdir() if folder.is_dir() else ()
        return sorted(p.name for p in found if COMMIT.fullmatch(p.name))

    def remember(self, repository: str, revision: str, commit: str) -> None:
        """Notes what a branch or tag stands for."""
        if revision != commit:
            path = self.repository(repository) / "refs" / quote(revision, safe="")
            path.parent.mkdir(parents=True, exist_ok=True)
            replace(path, commit.encode())

    def find(self, source: Source) -> Path:
        """The folder of a pulled checkpoint, or of the only share that is here.

        Raises:
          FetchError: it was not pulled, or not to the end; or there are several shares.
        """
        commit = self.resolve(source)
        folder = None if commit is None else self.commit(source.repository, commit)
        if commit is not None and folder is not None and not folder.is_dir():
            shares = self.shares(source.repository, commit)
            if len(shares) > 1:
                names = ", ".join(path.name for path in shares)
                raise FetchError(f"{source}: several shares are here, give one's folder: {names}")
            folder = shares[0] if shares else folder
        record = None if folder is None else read_record(folder)
        if folder is None or record is None or not record.files:
            raise FetchError(
                f"{source} is not in {self.folder}; fetch it: sparkjax pull {str(source)[3:]}"
            )
        missing = [f.name for f in record.files if not is_verified(folder, record, f)]
        if missing:
            raise FetchError(
                f"{folder}: {len(missing)} of {len(record.files)} files are missing or changed, the "
                f"first is {missing[0]}; finish with: sparkjax pull {str(source)[3:]}"
            )
        return folder


def read_record(folder: Path) -> Record | None:
    """The record of a pulled folder; None where there is none.

    Raises:
      FetchError: it is damaged.
    """
    path = folder / RECORD
    try:
        return msgspec.json.decode(path.read_bytes(), type=Record)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, ValueError) as error:
        raise FetchError(f"{path}: cannot be read: {error}; remove it and pull again") from None


def write_record(folder: Path, record: Record) -> None:
    """Replaces the record of a folder."""
    replace(folder / RECORD, json.dumps(msgspec.to_builtins(record), indent=1).encode())


def is_verified(folder: Path, record: Record, file: File) -> bool:
    """Whether a file is there, unchanged since its hash was found to be right."""
    noted = record.verified.get(file.name)
    return noted is not None and noted == stamp(folder / file.name)


def stamp(path: Path) -> tuple[int, int] | None:
    """(size, time of change in ns) of a file; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def replace(path: Path, data: bytes) -> None:
    """Writes a file so that a crash at any moment leaves the old or the new one."""
    new = path.with_name(f"{path.name}{PART}")
    with new.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    publish(new, path)


def publish(new: Path, path: Path) -> None:
    """Gives a durable file its own name, durably."""
    new.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps other pulls out of a folder; the lock dies with its process.

    Raises:
      FetchError: another one is at work.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise FetchError(f"{folder}: another pull is at work here") from None
        yield


def describe(value: Any) -> str:
    """A number of bytes in words."""
    size = float(value)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError
