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
    # What `sparkjax pull` notes of a folder differs from host to host.
    listed = [] if path.is_file() else [p for p in path.iterdir() if not p.name.startswith(".")]
    files = [path] if path.is_file() else sorted(p for p in listed if p.suffix in SUFFIXES)
    return {file.name: fingerprint(file) for file in files if file.is_file()}


def fingerprint(file: Path) -> str:
    """ "SIZE bytes, DIGEST" of one file."""
    size = file.stat().st_size
    state = hashlib.sha256()
    with file.open("rb") as stream:
        for begin, end in pieces(size):
            stream.seek(begin)
            while begin < end:
                piece = stream.read(min(_EDGE, end - begin))
                if not piece:
                    break
                state.update(piece)
                begin += len(piece)
    return f"{size} bytes, {state.hexdigest()[:16]}"


def pieces(size: int) -> list[tuple[int, int]]:
    """The byte ranges of a file of `size` bytes that its fingerprint is made of."""
    if size <= WHOLE:
        return [(0, size)]
    middle = [size * at // (_PIECES + 1) for at in range(1, _PIECES + 1)]
    return [(0, _EDGE), *((at, at + _PIECE) for at in middle), (size - _EDGE, size)]
