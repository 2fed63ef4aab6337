"""A profiler trace of live traffic."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.requests import Request

from sparkjax.text.characters import valid

from .errors import ApiError, missing
from .fields import Fields

LONGEST = 600.0
"""Seconds of a trace."""


def check_local(request: Request) -> None:
    """Raises ApiError unless the request comes from this host itself, not through a proxy."""
    host = request.client.host if request.client else ""
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    forwarded = {"forwarded", "x-forwarded-for", "x-real-ip"} & set(request.headers.keys())
    if not local or forwarded:
        raise ApiError(403, "this route answers only to its own host", code="not_local")


def parse(body: dict[str, Any]) -> tuple[float, Path]:
    """(seconds, directory) of a request for a trace."""
    fields = Fields(body)
    seconds = fields.number("seconds", 0, LONGEST, 5.0, above=True)
    text = fields.string("directory", longest=4096)
    if text is None:
        raise missing("directory", "an absolute path on the server")
    directory = Path(text)
    if (
        not directory.is_absolute()
        or "\0" in text
        or text != valid(text)
        or (directory.exists() and not directory.is_dir())
    ):
        raise fields.wrong("directory", "an absolute path of a directory, or of nothing yet")
    return seconds, directory


class Profiler:
    """Records one trace at a time.

    Args:
      start, stop: JAX's, or a test's.
    """

    def __init__(
        self, start: Callable[[str], None] | None = None, stop: Callable[[], None] | None = None
    ):
        self._start, self._stop = start, stop
        self._busy = False

    async def record(self, seconds: float, directory: Path) -> dict[str, Any]:
        """Traces for so long.

        Raises:
          ApiError: 409, another trace is being recorded; 400, the directory cannot be written.
        """
        if self._busy:
            raise ApiError(409, "a trace is being recorded already", code="profiler_busy")
        self._busy = True
        start, stop = self._functions()
        try:
            await asyncio.to_thread(_make, directory)
            await asyncio.to_thread(start, str(directory))
            try:
                await asyncio.sleep(seconds)
            finally:  # writing takes long; a client that leaves must not leave it half done
                await asyncio.shield(asyncio.to_thread(stop))
        finally:
            self._busy = False
        return {"directory": str(directory), "seconds": seconds}

    def _functions(self) -> tuple[Callable[[str], None], Callable[[], None]]:
        if self._start is not None and self._stop is not None:
            return self._start, self._stop
        import jax

        return jax.profiler.start_trace, jax.profiler.stop_trace


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ApiError(
            400,
            f"directory {directory}: {error.strerror}",
            param="directory",
            code="invalid_parameter",
        ) from None
