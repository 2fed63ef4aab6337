"""Bytes of large files, several reads at once, past the page cache where that is allowed.

A checkpoint is mapped, so a numpy view of the map says which bytes of which file are wanted, in
what order and with what strides. `Reader.fill` copies such views into arrays: not through page
faults, but with large aligned reads (O_DIRECT) into a few buffers, so that neither the page cache
nor the process holds the file beside the weights. A file system that refuses direct reads is read
through the page cache, whose pages are given back after each piece.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import errno
import functools
import math
import mmap
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np

from .errors import CheckpointError

PAGE = 4096
"""Alignment of direct reads and writes, in bytes: what file systems and disks accept."""
CHUNK = (4 << 20) - 2 * PAGE
"""Most bytes of one read: with the rest of the pages at both ends, two large pages."""
LONG = 256 << 10
"""Runs of at least so many bytes are read by themselves; shorter ones together with the gaps
between them, since a seek costs more than that."""
LARGE = 2 << 20
"""Bytes of a large page: a read into such memory reaches the disk in fewer requests."""
DIRECT = getattr(os, "O_DIRECT", 0)
HUGE = getattr(mmap, "MADV_HUGEPAGE", None)
POPULATE = 23
"""MADV_POPULATE_WRITE of Linux 5.14, which Python has no name for."""

Job = tuple[np.ndarray, np.ndarray]
"""(target, view of a mapped file), of equal shape."""


def down(n: int) -> int:
    """n rounded down to a multiple of PAGE."""
    return n - n % PAGE


def up(n: int) -> int:
    """n rounded up to a multiple of PAGE."""
    return n + -n % PAGE


def pages(nbytes: int, *, reused: bool = False) -> np.ndarray:
    """uint8 [at least nbytes, a multiple of PAGE] that begins on a page.

    Args:
      reused: whether it is filled again and again: then in large pages, where the system has them.
        Memory that is filled once is not: a virtual machine's host may have to find each large page
        anew (on one, 4.6 GB took 15 s of system time in large pages, 3 to 9 s in small ones).
    """
    # Only a whole number of large pages is placed where they fit.
    size = nbytes + -nbytes % LARGE if reused else up(nbytes)
    buffer = mmap.mmap(-1, max(size, PAGE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if HUGE is not None and reused:
        with contextlib.suppress(OSError):  # a kernel without large pages
            buffer.madvise(HUGE)
    return np.frombuffer(buffer, np.uint8)


def empty(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """An uninitialised array that begins on a page: JAX on a CPU takes it over without a copy."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    return pages(nbytes)[:nbytes].view(dtype).reshape(shape)


class Source:
    """One mapped file.

    Attributes:
      path: of the file.
      base: address of the map.
      size: bytes of the file.
    """

    def __init__(self, path: Path, mapped: np.ndarray):
        self.path, self.mapped = path, mapped
        self.base, self.size = mapped.ctypes.data, mapped.size

    def open(self, direct: bool) -> tuple[int, bool]:
        """A descriptor, and whether its reads are direct."""
        if direct and DIRECT:
            try:
                return os.open(self.path, os.O_RDONLY | DIRECT), True
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                    raise
        return os.open(self.path, os.O_RDONLY), False


class Sources:
    """Mapped files, and which of them an array is a view of."""

    def __init__(self, files: Iterable[tuple[Path, np.ndarray]]):
        self._sources = sorted((Source(p, m) for p, m in files), key=lambda s: s.base)
        self._bases = [s.base for s in self._sources]

    def of(self, array: np.ndarray) -> Source | None:
        """The file that an array is a view of; None for others and for empty ones."""
        at = bisect.bisect_right(self._bases, array.ctypes.data) - 1
        if at < 0 or array.size == 0 or any(s < 0 for s in array.strides):
            return None
        source = self._sources[at]
        inside = array.ctypes.data - source.base + extent(array) <= source.size
        return source if inside else None


def extent(view: np.ndarray) -> int:
    """Bytes from a view's first to its last one (strides must not be negative)."""
    if view.size == 0:
        return 0
    steps = zip(view.strides, view.shape, strict=True)
    return sum(s * (n - 1) for s, n in steps) + view.itemsize


def run(view: np.ndarray) -> int:
    """Bytes of a view's contiguous runs in the file."""
    length = view.itemsize
    steps: list[tuple[int, int]] = sorted(zip(view.strides, view.shape, strict=True))
    for step, size in steps:
        if size == 1:
            continue
        if step != length:
            break
        length *= size
    return length


def touched(view: np.ndarray) -> int:
    """Bytes of the pages that a view's runs lie in, each run for itself unless its neighbour
    shares a page: what an exact reader would have to ask the disk for."""
    if view.size == 0:
        return 0
    each, count = run(view), view.nbytes // run(view)
    gap = (extent(view) - view.nbytes) / max(count - 1, 1)
    if count == 1 or gap < PAGE:
        return up(extent(view))
    return count * up(each)


def pieces(target: np.ndarray, view: np.ndarray) -> Iterator[Job]:
    """A job cut along the file into jobs of at most CHUNK bytes from first to last, each dense
    enough to be read at once."""
    plain = target.flags.c_contiguous and view.flags.c_contiguous and target.dtype == view.dtype
    if plain and view.nbytes > CHUNK:
        into, source = target.reshape(-1).view(np.uint8), view.reshape(-1).view(np.uint8)
        for at in range(0, view.nbytes, CHUNK):
            yield into[at : at + CHUNK], source[at : at + CHUNK]
        return
    span = extent(view)
    sparse = view.nbytes * 2 < span and run(view) >= LONG
    if span <= CHUNK and not sparse:
        yield target, view
        return
    axis = max(
        (a for a in range(view.ndim) if view.shape[a] > 1), key=lambda a: view.strides[a]
    )
    stride, size = view.strides[axis], view.shape[axis]
    rest = span - stride * (size - 1)
    step = 1 if sparse else max(1, (CHUNK - rest) // stride + 1)
    for start in range(0, size, step):
        part = (slice(None),) * axis + (slice(start, start + step),)
        yield from pieces(target[part], view[part])


class Reader:
    """Reads views of mapped files.

    Attributes:
      read: bytes asked of the files so far, what lies between wanted runs among them.
      direct, advance: as given; may be set until the first read.
    """

    def __init__(
        self,
        files: Iterable[tuple[Path, np.ndarray]],
        *,
        parallel: int = 16,
        direct: bool = True,
        advance: Callable[[int], None] = lambda nbytes: None,
    ):
        """
        Args:
          files: each file's path and its map, uint8 [size].
          parallel: reads at a time.
          direct: past the page cache, where the file system allows that.
          advance: told of bytes that have arrived in their target, from any thread.
        """
        self._sources = Sources(files)
        self.direct, self.advance = direct, advance
        self._open: dict[int, tuple[int, bool]] = {}
        self._lock = threading.Lock()
        self._buffers: queue.SimpleQueue[np.ndarray] = queue.SimpleQueue()
        self._parallel = max(1, parallel)
        self._pool = ThreadPoolExecutor(self._parallel, "read")
        self.read = 0
        # Made by the time of the first read, while the caller still plans.
        for _ in range(self._parallel):
            self._pool.submit(lambda: self._buffers.put(_buffer()))

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        for fd, _direct in self._open.values():
            os.close(fd)
        self._open = {}

    def fill(self, jobs: Iterable[Job]) -> None:
        """Copies every view into its target (converting where dtypes differ); returns when all
        have arrived. Arrays that are no views of the files are copied as they are.

        Raises:
          CheckpointError: a file cannot be read, or has become shorter.
        """
        running: set[Future] = set()
        try:
            for target, view in jobs:
                source = self._sources.of(view)
                if source is None:
                    copy(target, view)
                    self.advance(target.nbytes)
                    continue
                for piece in pieces(target, view):
                    if len(running) > 4 * self._parallel:
                        done, running = wait(running, return_when=FIRST_COMPLETED)
                        for future in done:
                            future.result()
                    running.add(self._pool.submit(self._piece, source, *piece))
            for future in running:
                future.result()
        finally:
            # A failure must not leave threads that write into arrays nobody owns.
            for future in running:
                future.cancel()
            wait(running)

    def _piece(self, source: Source, target: np.ndarray, view: np.ndarray) -> None:
        begin = view.ctypes.data - source.base
        first, last = down(begin), begin + extent(view)
        fd, direct = self._descriptor(source)
        buffer = self._buffers.get()
        try:
            read_at(fd, buffer, first, last)
            here = np.ndarray(view.shape, view.dtype, buffer.data, begin - first, view.strides)
            populate(target)
            copy(target, here)
        except EOFError as error:
            raise CheckpointError(f"{source.path}: {error}") from None
        except OSError as error:
            raise CheckpointError(f"{source.path}: cannot be read: {error.strerror}") from None
        finally:
            self._buffers.put(buffer)
        if not direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, first, last - first, os.POSIX_FADV_DONTNEED)
        with self._lock:
            self.read += up(last) - first
        self.advance(target.nbytes)

    def _descriptor(self, source: Source) -> tuple[int, bool]:
        with self._lock:
            if source.base not in self._open:
                try:
                    self._open[source.base] = source.open(self.direct)
                except OSError as error:
                    raise CheckpointError(
                        f"{source.path}: cannot be read: {error.strerror}"
                    ) from None
            return self._open[source.base]


def _buffer() -> np.ndarray:
    """What one read goes through; touched, so that its large pages are there."""
    buffer = pages(CHUNK + 2 * PAGE, reused=True)
    buffer[:] = 0
    return buffer


def populate(target: np.ndarray) -> None:
    """Asks for the pages of fresh memory at once, which takes less than touching one by one; where
    that is not possible nothing is lost."""
    if target.nbytes < 1 << 20 or not target.flags.c_contiguous:
        return
    begin, end = up(target.ctypes.data), down(target.ctypes.data + target.nbytes)
    _madvise()(begin, end - begin, POPULATE)


@functools.cache
def _madvise() -> Callable[[int, int, int], int]:
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


def copy(target: np.ndarray, source: np.ndarray) -> None:
    """target[...] = source, other threads running meanwhile (numpy holds the interpreter's lock
    while it copies a dtype that it does not know, such as bfloat16, but not bytes)."""
    if target.dtype == source.dtype and target.itemsize in _WORDS and target.dtype.kind == "V":
        word = _WORDS[target.itemsize]
        target, source = target.view(word), source.view(word)
    target[...] = source


_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def read_at(fd: int, buffer: np.ndarray, first: int, last: int) -> None:
    """Bytes first .. last - 1 of a file into the beginning of a buffer.

    Args:
      buffer: uint8, begins on a page; holds last - first bytes rounded up to whole pages.
      first: a multiple of PAGE.

    Raises:
      EOFError: the file ends before `last`.
    """
    done, wanted = 0, last - first
    while done < wanted:
        got = os.preadv(fd, [buffer.data[done : up(wanted)]], first + done)
        if got == 0 or (done + got < wanted and got % PAGE):
            raise EOFError(f"ends at byte {first + done + got}; {last} are needed")
        done += got
