"""The hashes that a hub publishes: SHA-256 of large files, git's blob hash of small ones."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

CHUNK = 1 << 20
KINDS = ("sha256", "git-sha1")


def start(kind: str, size: int) -> Any:
    """A running hash of a file of `size` bytes.

    Args:
      kind: "sha256", or "git-sha1": SHA-1 over `blob SIZE\\0` and the bytes, as git names them.
    """
    if kind == "sha256":
        return hashlib.sha256()
    running = hashlib.sha1(usedforsecurity=False)
    running.update(b"blob %d\0" % size)
    return running


def feed(running: Any, path: Path, most: int | None = None) -> int:
    """Adds a file (its first `most` bytes); returns how many bytes that were."""
    done = 0
    with path.open("rb") as file:
        while block := file.read(CHUNK if most is None else min(CHUNK, most - done)):
            running.update(block)
            done += len(block)
    return done


def of(path: Path, kind: str) -> str:
    """The hash of a whole file, in hexadecimal."""
    running = start(kind, path.stat().st_size)
    feed(running, path)
    return str(running.hexdigest())
