"""API keys from a file, and how often each may be used."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable
from pathlib import Path

from .errors import ApiError


class Keys:
    """Known keys. Only their hashes are kept.

    Args:
      keys: at least one.
    """

    def __init__(self, keys: list[str]):
        if not keys:
            raise ValueError("no API key")
        self._digests = [_digest(key) for key in keys]

    @classmethod
    def read(cls, path: str | Path) -> Keys:
        """The keys of a file: one a line; empty lines and those that begin with # are skipped.

        Raises:
          ValueError: there is none. A server that should ask for keys must not open without.
          OSError: the file cannot be read.
        """
        lines = (line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines())
        keys = [line for line in lines if line and not line.startswith("#")]
        if not keys:
            raise ValueError(f"{path}: no API key in it")
        return cls(keys)

    def check(self, authorization: str | None) -> str:
        """The name of the key in an Authorization header.

        Raises:
          ApiError: 401, no key or an unknown one.
        """
        scheme, _, key = (authorization or "").partition(" ")
        given, found = _digest(key.strip()), None
        for digest in self._digests:  # all of them: time must not tell which one was close
            if hmac.compare_digest(given, digest):
                found = digest.hex()
        if scheme.lower() != "bearer" or found is None:
            what = "Incorrect API key" if authorization else "No API key"
            raise ApiError(
                401,
                f"{what}: send Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class RateLimit:
    """So many requests a minute for each key: a full minute's worth at once, then evenly.

    Args:
      per_minute: the limit.
      clock: in seconds.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic):
        self._most, self._clock = per_minute, clock
        self._left: dict[str, tuple[float, float]] = {}  # key -> (requests left, at this time)

    def check(self, key: str) -> None:
        """Takes one request of the key.

        Raises:
          ApiError: 429, none is left.
        """
        now, rate = self._clock(), self._most / 60
        left, then = self._left.get(key, (float(self._most), now))
        left = min(self._most, left + (now - then) * rate)
        if left < 1:
            self._left[key] = (left, now)
            raise ApiError(
                429,
                f"rate limit: {self._most} requests a minute for each key",
                code="rate_limit_exceeded",
                retry_after=(1 - left) / rate,
            )
        self._left[key] = (left - 1, now)
