"""Counting XLA compilations: after readiness there must be none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax
from jax import monitoring

CACHE_BYTES = 4 << 30
"""The largest persistent cache; the entries used longest ago go first."""

_COMPILE = "/jax/core/compile/backend_compile_duration"
_count = 0
_listening = False


def _listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
    global _count
    if event == _COMPILE:
        _count += 1


def count() -> int:
    """Compilations (or loads from the persistent cache) since the first call of this function."""
    global _listening
    if not _listening:
        monitoring.register_event_duration_secs_listener(_listen)
        _listening = True
    return _count


class Recompiled(AssertionError):
    """Something was compiled where nothing may be."""


@contextlib.contextmanager
def forbidden() -> Iterator[None]:
    """Raises Recompiled at the end of the block if anything was compiled inside it."""
    before = count()
    yield
    if count() != before:
        raise Recompiled(f"{count() - before} programs were compiled")


def use_cache(directory: str | Path | None) -> None:
    """Keeps compiled programs in `directory` (made with mode 0700: it holds executable code)."""
    if directory is None:
        return
    path = Path(directory).expanduser()
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    jax.config.update("jax_compilation_cache_dir", str(path))
    # A bound makes JAX lock the files: without one, a second process may read half of an entry.
    jax.config.update("jax_compilation_cache_max_size", CACHE_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
