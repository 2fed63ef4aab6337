"""One file over HTTP: resumed where it stopped, hashed as it comes, named when it is whole."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import httpx

from . import hashes
from .errors import FetchError
from .store import PART, File, publish

log = logging.getLogger(__name__)
TRIES = 6
"""Attempts in a row that bring no new byte."""
TIMEOUT = httpx.Timeout(60.0, connect=20.0)

Advance = Callable[[int, bool], None]
"""Called with how many more bytes there are (negative where some must be fetched again), and
whether they have just come over the network."""


def download(
    client: httpx.Client,
    url: str,
    headers: Mapping[str, str],
    file: File,
    folder: Path,
    advance: Advance = lambda count, came: None,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Brings one file into a folder.

    Bytes of an earlier attempt (NAME.part) are kept and hashed again. A file whose hash is wrong
    is thrown away and fetched once more from its start.

    Args:
      client: follows redirects (and drops credentials where they lead elsewhere).
      pause: waits between attempts.

    Raises:
      FetchError: the server refuses, the connection does not come back, or the hash stays wrong.
    """
    target = folder / file.name
    part = target.with_name(target.name + PART)
    target.parent.mkdir(parents=True, exist_ok=True)
    for wrong in (0, 1):
        found = _whole(client, url, headers, file, part, advance, pause)
        if found == file.hash:
            publish(part, target)
            return
        part.unlink()
        advance(-file.size, False)
        log.warning("%s: its %s is %s, not %s", file.name, file.kind, found, file.hash)
        if wrong:
            raise FetchError(
                f"{file.name}: {file.kind} is {found}, expected {file.hash}: the server's file is not "
                "the published one"
            )


def _whole(
    client: httpx.Client,
    url: str,
    headers: Mapping[str, str],
    file: File,
    part: Path,
    advance: Advance,
    pause: Callable[[float], None],
) -> str:
    """Fills a partial file up to its size; returns its hash."""
    running = hashes.start(file.kind, file.size)
    have = part.stat().st_size if part.exists() else 0
    if have > file.size:
        part.unlink()
        have = 0
    if have:
        hashes.feed(running, part)
        advance(have, False)
    tries = 0
    with part.open("ab") as out:
        while have < file.size:
            before = have
            try:
                asked = {**headers, "Accept-Encoding": "identity"}
                if have:
                    asked["Range"] = f"bytes={have}-"
                with client.stream("GET", url, headers=asked, timeout=TIMEOUT) as got:
                    if got.status_code >= 400:
                        raise _refused(got, file)
                    if have and got.status_code != 206:  # it sends all of it again
                        out.truncate(0)
                        advance(-have, False)
                        have, running = 0, hashes.start(file.kind, file.size)
                    for block in got.iter_raw():
                        if have + len(block) > file.size:
                            raise FetchError(f"{file.name}: more than {file.size} bytes arrive")
                        out.write(block)
                        running.update(block)
                        have += len(block)
                        advance(len(block), True)
            except (httpx.TransportError, _Later) as error:
                out.flush()
                tries = tries + 1 if have == before else 1
                if tries >= TRIES:
                    raise FetchError(
                        f"{file.name}: gave up at {have} of {file.size} bytes: {_words(error)}; what "
                        "there is stays, start again to go on"
                    ) from None
                log.info("%s: %s at %d bytes, again", file.name, _words(error), have)
                pause(min(2.0**tries / 4, 30.0))
            else:
                # A server may end early without an error.
                tries = tries + 1 if have == before else 0
                if tries >= TRIES:
                    raise FetchError(f"{file.name}: only {have} of {file.size} bytes arrive")
        out.flush()
        os.fsync(out.fileno())
    return str(running.hexdigest())


class _Later(Exception):
    """The server asks for patience."""


def _refused(got: httpx.Response, file: File) -> Exception:
    status = got.status_code
    if status in (408, 429) or status >= 500:
        return _Later(f"HTTP {status}")
    hint = "; set HF_TOKEN, or accept its terms on its page" if status in (401, 403) else ""
    return FetchError(f"{file.name}: the server answers {status}{hint}")


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
