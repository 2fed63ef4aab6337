"""Fingerprints of a checkpoint's files: whether two hosts have the same, without reading all bytes.

Small files are hashed whole. Of a large one its size, its first and last MiB and 16 pieces between
are: enough to tell two versions, quantizations or a cut-off copy apart in milliseconds, though not a
single flipped bit.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

SUFFIXES = (".json", ".safetensors", ".gguf", ".model", ".jinja", ".txt", ".npy")
WHOLE = 32 << 20
"""Bytes up to which a file is hashed whole."""
_EDGE, _PIECE, _PIECES = 1 << 20, 1 << 16, 16


def fingerprints(path: str | Path) -> dict[str, str]:
    """File name -> size and digest, for every file of a checkpoint that decides what it computes.

    Args:
      path: a checkpoint directory or a .gguf file.
    """
    path = Path(path)
    files = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.suffix in SUFFIXES)
    return {file.name: fingerprint(file) for file in files if file.is_file()}


def fingerprint(file: Path) -> str:
    """ "SIZE bytes, DIGEST" of one file."""
    size = file.stat().st_size
    state = hashlib.sha256()
    with file.open("rb") as stream:
        if size <= WHOLE:
            while piece := stream.read(_EDGE):
                state.update(piece)
        else:
            state.update(stream.read(_EDGE))
            for at in range(1, _PIECES + 1):
                stream.seek(size * at // (_PIECES + 1))
                state.update(stream.read(_PIECE))
            stream.seek(size - _EDGE)
            state.update(stream.read(_EDGE))
    return f"{size} bytes, {state.hexdigest()[:16]}"
