"""The share of one rank: of the weight files only the byte ranges that it reads.

A share is a folder of its own (COMMIT.RANKofRANKS) whose weight files have their full size and
holes. The published hash of a file cannot be checked over a part of it, so:

- a file all of whose bytes are wanted, and every file beside the weights, is held to its published
  hash, like those of a whole pull;
- of other files each range is written down with the SHA-256 of what arrived, so that any later
  change here is found, and nothing more: what arrived is believed. The ranges that a fingerprint is
  made of come too, and ranks compare fingerprints when they start.

While it grows, FILE.part has the bytes and FILE.ranges.part a line for each range that is durable.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

import httpx

from ..weights import fingerprint
from ..weights.safetensors import HEADER_LIMIT
from ..weights.spans import Range, merged, without
from .download import TIMEOUT, TRIES
from .errors import FetchError
from .store import PART, File, publish

PIECE = 64 << 20
"""Most bytes of one request."""
LOG = ".ranges" + PART
PLAN = ".pull-plan"
"""Folder of the links over which the ranges are planned."""

Noted = tuple[int, int, str]
"""A range and the SHA-256 of its bytes."""


class Partial:
    """A weight file that is here in part.

    Args:
      folder: of the share.
      ask: see `ranged`.

    Attributes:
      noted: the ranges that are here and durable.
    """

    def __init__(self, file: File, folder: Path, ask: Callable[[Range], Iterator[bytes]]):
        self.file, self._ask = file, ask
        self.path = folder / (file.name + PART)
        self._log = folder / (file.name + LOG)
        self._lock = threading.Lock()
        self.noted: list[Noted] = []
        self._resume()
        with self.path.open("ab"):
            os.truncate(self.path, file.size)

    @property
    def here(self) -> list[Range]:
        return [(begin, end) for begin, end, _ in self.noted]

    def missing(self, wanted: Sequence[Range]) -> list[Range]:
        """What is not here of some ranges, in requests of at most PIECE bytes."""
        left = without(merged(wanted), self.here)
        return [
            (at, min(at + PIECE, end)) for begin, end in left for at in range(begin, end, PIECE)
        ]

    def header(self) -> Range:
        """The range of the file's header, which says what is where; its first 8 bytes are here.

        Raises:
          FetchError: it is none.
        """
        with self.path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
        if length > min(HEADER_LIMIT, self.file.size - 8):
            raise FetchError(f"{self.file.name}: its header says {length} bytes")
        return 0, 8 + length

    def bring(self, wanted: Range, advance: Callable[[int], None] = lambda count: None) -> None:
        """Fetches one range and notes it once it is durable.

        Raises:
          FetchError, httpx.TransportError: it does not come whole.
        """
        begin, end = wanted
        state, at = hashlib.sha256(), begin
        with self.path.open("r+b") as out:
            out.seek(begin)
            for block in self._ask(wanted):
                if at + len(block) > end:
                    raise FetchError(f"{self.file.name}: more than bytes {begin} to {end} arrive")
                out.write(block)
                state.update(block)
                at += len(block)
                advance(len(block))
            if at < end:
                raise httpx.ReadError(f"bytes {at} to {end} do not arrive")
            out.flush()
            os.fsync(out.fileno())
        note = (begin, end, state.hexdigest())
        with self._lock, self._log.open("a") as log:
            log.write(json.dumps(note) + "\n")
            log.flush()
            os.fsync(log.fileno())
            self.noted.append(note)

    def finish(self) -> None:
        """Gives the file its own name."""
        publish(self.path, self.path.with_name(self.path.name.removesuffix(PART)))
        self._log.unlink(missing_ok=True)

    def discard(self) -> None:
        """Forgets what is here."""
        self.path.unlink(missing_ok=True)
        self._log.unlink(missing_ok=True)

    def _resume(self) -> None:
        """Takes over what an earlier pull noted and what is still so."""
        if not self.path.exists() or not self._log.exists():
            self.discard()
            return
        for line in self._log.read_text().splitlines():
            try:
                begin, end, digest = json.loads(line)
            except ValueError:  # the last line of a pull that was killed
                continue
            if digest_of(self.path, (begin, end)) == digest:
                self.noted.append((begin, end, digest))
        self._log.write_text("".join(json.dumps(note) + "\n" for note in self.noted))


def reopen(file: File, folder: Path, notes: Sequence[Noted]) -> None:
    """Makes a file that had its own name a partial one again, with these ranges."""
    (folder / (file.name + LOG)).write_text("".join(json.dumps(note) + "\n" for note in notes))
    (folder / file.name).rename(folder / (file.name + PART))


def digest_of(path: Path, part: Range) -> str:
    """SHA-256 of a range of a file."""
    state, (at, end) = hashlib.sha256(), part
    with path.open("rb") as file:
        file.seek(at)
        while at < end and (block := file.read(min(1 << 20, end - at))):
            state.update(block)
            at += len(block)
    return state.hexdigest()


def ranged(
    client: httpx.Client, url: str, headers: Mapping[str, str], file: File
) -> Callable[[Range], Iterator[bytes]]:
    """Asks a server for ranges of a file.

    Raises:
      FetchError: (when asked) it has another file, or answers no ranges.
    """

    def ask(wanted: Range) -> Iterator[bytes]:
        begin, end = wanted
        asked = {**headers, "Accept-Encoding": "identity", "Range": f"bytes={begin}-{end - 1}"}
        with client.stream("GET", url, headers=asked, timeout=TIMEOUT) as got:
            if got.status_code in (408, 429) or got.status_code >= 500:
                raise httpx.ReadError(f"HTTP {got.status_code}")
            given = got.headers.get("content-range", "")
            if got.status_code != 206 or given != f"bytes {begin}-{end - 1}/{file.size}":
                raise FetchError(
                    f"{file.name}: the server answers {got.status_code} {given!r} to a range; "
                    "pull whole files, without --rank"
                )
            yield from got.iter_raw()

    return ask


def fetch_ranges(
    partials: Sequence[Partial],
    wanted: Mapping[str, Sequence[Range]],
    parallel: int,
    advance: Callable[[File, int, bool], None],
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Brings what is missing of the wanted ranges, several at a time.

    Raises:
      FetchError: a range does not come, after some attempts.
    """
    stop = threading.Event()

    def one(partial: Partial, part: Range) -> None:
        for tries in range(1, TRIES + 1):
            if stop.is_set():
                return
            came = 0

            def count(more: int) -> None:
                nonlocal came
                came += more
                advance(partial.file, more, True)

            try:
                partial.bring(part, count)
                return
            except httpx.TransportError as error:
                advance(partial.file, -came, False)
                if tries == TRIES:
                    raise FetchError(
                        f"{partial.file.name}: gave up at bytes {part[0]} to {part[1]}: {error}; "
                        "what there is stays, start again to go on"
                    ) from None
                pause(min(2.0**tries / 4, 30.0))

    with ThreadPoolExecutor(parallel, thread_name_prefix="pull") as pool:
        tasks = [
            pool.submit(one, partial, part)
            for partial in partials
            for part in partial.missing(wanted[partial.file.name])
        ]
        try:
            wait(tasks, return_when=FIRST_EXCEPTION)
        finally:
            stop.set()
    for task in tasks:
        task.result()


def ranges_of(
    folder: Path, partials: Sequence[Partial], ranks: int, rank: int
) -> dict[str, list[Range]]:
    """For each file, the ranges that a rank reads, planned over the files as far as they are here.

    Raises:
      FetchError: this code cannot read the checkpoint.
    """
    from ..model import loaded_tree
    from ..models import tables
    from ..models.config import UnsupportedConfig
    from ..models.registry import family_of
    from ..weights.checkpoint import Directory
    from ..weights.errors import CheckpointError
    from ..weights.ranges import wanted

    plan = folder / PLAN
    shutil.rmtree(plan, ignore_errors=True)
    plan.mkdir()
    try:
        for path in folder.iterdir():
            if path.is_file() and path.suffix == ".json" and not path.name.startswith("."):
                os.link(path, plan / path.name)
        for partial in partials:
            os.link(partial.path, plan / partial.file.name)
        checkpoint = Directory(plan)
        family = family_of(checkpoint.config)
        config = family.read_config(checkpoint.config)
        tree, _ = loaded_tree(family, config, ranks, checkpoint)
        hosted = tables.tensors(tables.declared(family, config), checkpoint)
        found = wanted(tree, checkpoint, ranks, rank, hosted)
    except (CheckpointError, UnsupportedConfig) as error:
        raise FetchError(f"{error}; pull whole files, without --rank") from None
    finally:
        shutil.rmtree(plan, ignore_errors=True)
    sizes = {partial.file.name: partial.file.size for partial in partials}
    return {
        path.name: merged([*ranges, *fingerprint.pieces(sizes[path.name])])
        for path, ranges in found.items()
    }
