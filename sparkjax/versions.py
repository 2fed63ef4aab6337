"""What code this is: versions of the packages that decide results, and a digest of this one."""

from __future__ import annotations

import hashlib
import platform
from importlib import metadata
from pathlib import Path

PACKAGES = ("jax", "jaxlib", "numpy", "ml_dtypes", "msgspec", "tokenizers", "llguidance")
"""Distributions whose version may change a token or a decision."""
SOURCES = (".py", ".cc", ".cu", ".h")


def versions() -> dict[str, str]:
    """Name -> version of everything that ranks of one world must have in common."""
    found = {"python": platform.python_version(), "sparkjax code": code_digest()}
    for name in ("sparkjax", *PACKAGES):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def code_digest() -> str:
    """SHA-256 over this package's sources, the first 16 hex digits."""
    root = Path(__file__).resolve().parent
    state = hashlib.sha256()
    for path in sorted(p for p in root.rglob("*") if p.suffix in SOURCES):
        state.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return state.hexdigest()[:16]
