"""`sparkjax pull`: what is missing of a checkpoint, from a hub or from another box."""

from __future__ import annotations

import dataclasses
import json
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

import httpx

from ..weights.spans import Range, merged
from . import hashes, select
from .download import download
from .errors import FetchError
from .hub import Hub
from .partial import Partial, digest_of, fetch_ranges, ranged, ranges_of, reopen
from .source import COMMIT, Source
from .store import (
    PART,
    File,
    Record,
    Store,
    describe,
    is_verified,
    locked,
    read_record,
    stamp,
    write_record,
)

RESERVE = 1 << 30
"""Bytes of the disk that stay free."""
PARALLEL = 4
"""Files at a time."""
MOST_PLANS = 4
"""Times that the ranges of a share are planned, the first one over headers alone."""

Progress = Callable[[int, int, str], None]
"""Called with (bytes here, bytes in all, the file that moves)."""


@dataclasses.dataclass(frozen=True)
class Pulled:
    """What a pull did.

    Attributes:
      path: the folder, or the .gguf file.
      commit: which revision it is.
      files, bytes: what is here now.
      fetched: bytes that came over the network (for this call).
    """

    path: Path
    commit: str
    files: int
    bytes: int
    fetched: int


def pull(
    source: Source,
    store: Store,
    hub: Hub | None = None,
    *,
    needed: bool = False,
    share: tuple[int, int] | None = None,
    offline: bool = False,
    progress: Progress = lambda done, total, name: None,
    parallel: int = PARALLEL,
    pause: Callable[[float], None] = time.sleep,
) -> Pulled:
    """Brings a checkpoint into the store, and checks every file against its published hash.

    Whatever an earlier call left is kept. Files that were verified before and have not changed
    since are not read again.

    Args:
      hub: where from (default: huggingface_hub's own).
      needed: leave out weight files none of whose tensors this code reads.
      share: (rank, ranks): only what this rank reads (see `partial`). A checkpoint that is here
        whole, has no safetensors files or is for one rank alone is pulled as with `needed`.
      offline: touch no network: only check what is here.
      pause: waits between attempts.

    Raises:
      FetchError: no such checkpoint, no room, no connection, a wrong hash.
    """
    if offline:
        return _check(source, store, share, progress)
    hub = hub or Hub()
    commit, files = hub.files(source)
    if source.revision and COMMIT.fullmatch(source.revision) and commit != source.revision:
        raise FetchError(f"{hub.endpoint} answers with commit {commit} for {source}")
    folder = store.commit(source.repository, commit)
    by_name = {file.name: file for file in files}
    if share is not None:
        tensors = select.INDEX in by_name or select.SINGLE in by_name
        needed, whole = True, folder.is_dir() or share[1] == 1 or source.file or not tensors
        folder = folder if whole else store.share(source.repository, commit, *share)
        share = None if whole else share
    with locked(folder):
        work = _Work(hub, folder, progress, parallel, pause)
        work.record = read_record(folder) or Record(
            repository=source.repository, commit=commit, files=[], share=share
        )
        try:
            _pull(work, source, by_name, needed)
        except FetchError as error:
            raise FetchError(f"{source}: {error}") from None
        if source.revision is None or not COMMIT.fullmatch(source.revision):
            store.remember(source.repository, source.revision or "main", commit)
        return _pulled(source, folder, work.record, work.fetched)


def _pull(work: _Work, source: Source, by_name: dict[str, File], needed: bool) -> None:
    names = list(by_name)
    beside = [] if source.file else select.small(names)
    # The small files say which large ones there are.
    first = [n for n in beside if n in (select.CONFIG, select.INDEX)]
    work.fetch([by_name[n] for n in first], more=0)
    weight_map = _weight_map(work.folder) if select.INDEX in first else None
    wanted = select.weights(names, weight_map, source.file)
    left_out: set[str] = set()
    if needed and weight_map is not None and select.CONFIG in first:
        config = json.loads((work.folder / select.CONFIG).read_bytes())
        left_out = select.unread(config, weight_map)
    wanted = [n for n in wanted if n not in left_out]
    work.want([by_name[n] for n in [*beside, *wanted]], sorted(left_out))
    if work.record.share is None:
        work.fetch(work.record.files, more=RESERVE)
        return
    work.fetch([f for f in work.record.files if f.name not in wanted], more=0)
    work.fetch_share([by_name[n] for n in wanted])


def _weight_map(folder: Path) -> dict[str, str]:
    path = folder / select.INDEX
    try:
        found = json.loads(path.read_bytes())["weight_map"]
    except (ValueError, KeyError, TypeError):
        raise FetchError(f"{select.INDEX} has no weight_map") from None
    if not isinstance(found, dict) or not all(isinstance(v, str) for v in found.values()):
        raise FetchError(f"{select.INDEX}: weight_map is not a mapping of tensors to files")
    return found


class _Work:
    """One pull: its record, its threads, its progress."""

    record: Record

    def __init__(
        self,
        hub: Hub,
        folder: Path,
        progress: Progress,
        parallel: int,
        pause: Callable[[float], None],
    ):
        self.hub, self.folder, self.parallel, self.pause = hub, folder, parallel, pause
        self.fetched = 0
        self._progress, self._lock = progress, threading.Lock()
        self._done, self._total = 0, 0

    def want(self, files: Sequence[File], left_out: list[str]) -> None:
        """Adds files to the record; what an earlier pull asked for stays asked for."""
        known = {file.name: file for file in self.record.files}
        known |= {file.name: file for file in files}
        self.record.files = list(known.values())
        self.record.left_out = [n for n in left_out if n not in known]
        write_record(self.folder, self.record)

    def fetch(self, files: Sequence[File], more: int) -> None:
        """Makes all these files whole and verified.

        Args:
          more: bytes of the disk that must stay free beside them.
        """
        missing = [f for f in files if not is_verified(self.folder, self.record, f)]
        # A crash may have come between a file's renaming and its note: look before fetching.
        here = [f for f in missing if (stamp(self.folder / f.name) or (-1, 0))[0] == f.size]
        self._room([f for f in missing if f not in here], more)
        self._total = sum(f.size for f in files)
        self._done = self._total - sum(f.size for f in missing)
        self._progress(self._done, self._total, "")
        if not missing:
            return
        headers = self.hub.headers
        limits = httpx.Limits(max_connections=self.parallel)
        with httpx.Client(follow_redirects=True, limits=limits) as client:
            self._all(client, headers, missing, {f.name for f in here})

    def _all(
        self, client: httpx.Client, headers: dict[str, str], files: list[File], here: set[str]
    ) -> None:
        stop = threading.Event()

        def one(file: File) -> None:
            if stop.is_set():
                return
            target = self.folder / file.name
            if file.name in here and hashes.of(target, file.kind) == file.hash:
                self._advance(file, file.size, False)
            else:
                target.unlink(missing_ok=True)
                url = self.hub.url(self.record.repository, self.record.commit, file.name)

                def advance(count: int, came: bool) -> None:
                    self._advance(file, count, came)
                    if stop.is_set():
                        raise FetchError("stopped")

                download(client, url, headers, file, self.folder, advance, self.pause)
            found = stamp(target)
            assert found is not None
            with self._lock:
                self.record.verified[file.name] = found
                write_record(self.folder, self.record)

        with ThreadPoolExecutor(self.parallel, thread_name_prefix="pull") as pool:
            tasks = [pool.submit(one, file) for file in files]
            try:
                wait(tasks, return_when=FIRST_EXCEPTION)
            finally:
                # Also after an interrupt: the others end at their next block.
                failed = next((t for t in tasks if t.done() and t.exception()), None)
                if failed is not None or not all(t.done() for t in tasks):
                    stop.set()
        if failed is not None:
            failed.result()

    def fetch_share(self, files: Sequence[File]) -> None:
        """Brings of these weight files what the share's rank reads."""
        assert self.record.share is not None
        rank, ranks = self.record.share
        if all(is_verified(self.folder, self.record, file) for file in files):
            return
        limits = httpx.Limits(max_connections=self.parallel)
        with httpx.Client(follow_redirects=True, limits=limits) as client:

            def partial_of(file: File) -> Partial:
                url = self.hub.url(self.record.repository, self.record.commit, file.name)
                return Partial(file, self.folder, ranged(client, url, self.hub.headers, file))

            for file in files:  # one that was finished may have been changed since
                if (self.folder / file.name).exists():
                    whole = [(0, file.size, file.hash)] if file.kind == "sha256" else []
                    reopen(file, self.folder, self.record.parts.pop(file.name, whole))
            partials = [partial_of(file) for file in files]
            fetch_ranges(partials, {f.name: [(0, min(8, f.size))] for f in files}, self.parallel,
                         lambda *moved: None, self.pause)  # fmt: skip
            fetch_ranges(partials, {p.file.name: [p.header()] for p in partials}, self.parallel,
                         lambda *moved: None, self.pause)  # fmt: skip
            # What is in the small tensors may decide about the ranges of others: plan again.
            wanted: dict[str, list[Range]] = {}
            for _ in range(MOST_PLANS):
                wanted = ranges_of(self.folder, partials, ranks, rank)
                left = sum(e - b for p in partials for b, e in p.missing(wanted[p.file.name]))
                if not left:
                    break
                self._room_for(left, RESERVE)
                self._total = sum(e - b for each in wanted.values() for b, e in each)
                self._done = self._total - left
                fetch_ranges(partials, wanted, self.parallel, self._advance, self.pause)
            else:
                raise FetchError(
                    "its ranges change with every plan; pull whole files, without --rank"
                )
            for partial in partials:
                self._close(partial)

    def _close(self, partial: Partial) -> None:
        """A file of a share is as whole as it gets."""
        file = partial.file
        if merged(partial.here, 0) == [(0, file.size)]:
            found = hashes.of(partial.path, file.kind)
            if found != file.hash:
                partial.discard()
                raise FetchError(f"{file.name}: {file.kind} is {found}, expected {file.hash}")
        else:
            self.record.parts[file.name] = sorted(partial.noted)
        partial.finish()
        stamped = stamp(self.folder / file.name)
        assert stamped is not None
        self.record.verified[file.name] = stamped
        write_record(self.folder, self.record)

    def _advance(self, file: File, count: int, came: bool) -> None:
        with self._lock:
            self._done += count
            self.fetched += count if came else 0
            self._progress(self._done, self._total, file.name)

    def _room(self, files: Sequence[File], more: int) -> None:
        def have(file: File) -> int:
            part = self.folder / (file.name + PART)
            return part.stat().st_size if part.exists() else 0

        self._room_for(sum(max(f.size - have(f), 0) for f in files), more)

    def _room_for(self, need: int, more: int) -> None:
        free = shutil.disk_usage(self.folder).free
        if need and need + more > free:
            raise FetchError(
                f"{describe(need)} are to come and {describe(more)} stay free, but {self.folder} has "
                f"only {describe(free)}; set weights.folder to a larger disk"
            )


def _check(
    source: Source, store: Store, share: tuple[int, int] | None, progress: Progress
) -> Pulled:
    """Every file of a pulled checkpoint against its hash (of a share's, every range), without a
    network."""
    commit = store.resolve(source)
    folder = None if commit is None else store.commit(source.repository, commit)
    if commit is not None and folder is not None and not folder.is_dir():
        shares = store.shares(source.repository, commit)
        if share is not None:
            shares = [store.share(source.repository, commit, *share)]
        folder = shares[0] if len(shares) == 1 else None
    record = None if folder is None else read_record(folder)
    if folder is None or record is None or not record.files:
        raise FetchError(f"{source} is not in {store.folder}, and --offline fetches nothing")
    total, done = sum(f.size for f in record.files), 0
    bad = []
    with locked(folder):
        for file in record.files:
            path = folder / file.name
            found = stamp(path)
            if found is None:
                bad.append(f"{file.name} is missing")
            elif found[0] != file.size or not _right(path, file, record):
                bad.append(f"{file.name} is not what was published")
                record.verified.pop(file.name, None)
            else:
                record.verified[file.name] = found
            done += file.size
            progress(done, total, file.name)
        write_record(folder, record)
    if bad:
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        raise FetchError(f"{source}: {bad[0]}{more}; pull again without --offline")
    return _pulled(source, folder, record, 0)


def _right(path: Path, file: File, record: Record) -> bool:
    parts = record.parts.get(file.name)
    if parts is None:
        return hashes.of(path, file.kind) == file.hash
    return all(digest_of(path, (begin, end)) == digest for begin, end, digest in parts)


def _pulled(source: Source, folder: Path, record: Record, fetched: int) -> Pulled:
    path = folder / source.file if source.file else folder
    parts = {name: sum(e - b for b, e, _ in some) for name, some in record.parts.items()}
    total = sum(parts.get(f.name, f.size) for f in record.files)
    return Pulled(path, record.commit, len(record.files), total, fetched)
