"""The byte form of journal records: one codec for the wire, the crash log and replay.

A frame is a header of three big-endian uint32 (payload length, crc32 of the payload, crc32 of the
eight bytes before) and the payload, the record in MessagePack. The header has its own check so
that a damaged length is found at once: nobody waits for bytes that never come or allocates for
them. Integers keep 64 bits and floats all of theirs.
"""

from __future__ import annotations

import dataclasses
import os
import struct
import zlib
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import msgspec

from .records import Entry

MAX_FRAME = 64 << 20
"""The largest payload in bytes, written or read."""

_HEAD = struct.Struct(">II")
_CHECK = struct.Struct(">I")
HEADER = _HEAD.size + _CHECK.size
_CHUNK = 1 << 20

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Entry)


class JournalError(ValueError):
    """These bytes are no journal, or this record cannot be one."""


def encode(record: Entry) -> bytes:
    """One frame. Raises JournalError for what a frame cannot hold."""
    try:
        payload = _encoder.encode(record)
    except (OverflowError, TypeError, ValueError) as error:
        raise JournalError(f"cannot encode a {type(record).__name__}: {error}") from error
    if len(payload) > MAX_FRAME:
        raise JournalError(
            f"a {type(record).__name__} of {len(payload)} bytes; a frame holds {MAX_FRAME}"
        )
    head = _HEAD.pack(len(payload), zlib.crc32(payload))
    return head + _CHECK.pack(zlib.crc32(head)) + payload


class Decoder:
    """Frames from a stream in pieces of any size. Holds at most one frame and one piece."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._offset = 0  # of the buffer's first byte in the stream
        self._broken: JournalError | None = None

    @property
    def offset(self) -> int:
        """Where in the stream the last whole frame ended."""
        return self._offset

    @property
    def pending(self) -> int:
        """Bytes of a frame that is not whole yet."""
        return len(self._buffer)

    def feed(self, data: bytes | bytearray | memoryview) -> list[Entry]:
        """The records that these bytes complete.

        Raises JournalError at the first damaged frame, and from then on: there is no way to find
        the next one. Whole records in front of it in the same piece are lost with it.
        """
        if self._broken is not None:
            raise self._broken
        self._buffer += data
        records = []
        start = 0
        try:
            while (length := self._length(start)) is not None:
                end = start + HEADER + length
                if end > len(self._buffer):
                    break
                records.append(self._record(start, end))
                start = end
        except JournalError as error:
            self._broken = error
            self._buffer = bytearray()
            raise
        self._offset += start
        del self._buffer[:start]
        return records

    def _length(self, start: int) -> int | None:
        """Payload length of the frame at `start`; None while its header is not whole."""
        if len(self._buffer) - start < HEADER:
            return None
        at = self._offset + start
        head = bytes(self._buffer[start : start + _HEAD.size])
        (check,) = _CHECK.unpack_from(self._buffer, start + _HEAD.size)
        if zlib.crc32(head) != check:
            raise JournalError(f"byte {at}: damaged frame header, or no journal")
        length: int = _HEAD.unpack(head)[0]
        if length > MAX_FRAME:
            raise JournalError(f"byte {at}: a frame of {length} bytes; the most is {MAX_FRAME}")
        return length

    def _record(self, start: int, end: int) -> Entry:
        at = self._offset + start
        payload = bytes(self._buffer[start + HEADER : end])
        if zlib.crc32(payload) != _HEAD.unpack_from(self._buffer, start)[1]:
            raise JournalError(f"byte {at}: damaged frame")
        try:
            return _decoder.decode(payload)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise JournalError(f"byte {at}: not a record: {error}") from error


class JournalWriter:
    """Appends records to a file: the crash log.

    Every `write` hands a whole frame to the operating system, so that a process that is killed
    loses at most the frame that it was writing. A torn frame at the end of an existing file is cut
    off first. Raises JournalError if the file is damaged before its end.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._file: BinaryIO = self.path.open("a+b", buffering=0)
        try:
            self._file.seek(0)
            decoder = Decoder()
            while piece := self._file.read(_CHUNK):
                decoder.feed(piece)
            self._file.truncate(decoder.offset)
        except BaseException:
            self._file.close()
            raise

    def write(self, record: Entry) -> None:
        frame = memoryview(encode(record))
        while frame:  # a raw write may take only a part
            frame = frame[self._file.write(frame) :]

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> JournalWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@dataclasses.dataclass(frozen=True)
class Journal:
    """A file's records in order, and how many bytes of a torn last frame were ignored."""

    records: tuple[Entry, ...]
    torn: int


def read_journal(path: str | os.PathLike[str]) -> Journal:
    """Reads a crash log. Raises JournalError, naming the byte, if it is damaged before its end."""
    decoder = Decoder()
    records: list[Entry] = []
    with Path(path).open("rb") as file:
        while piece := file.read(_CHUNK):
            records += decoder.feed(piece)
    return Journal(tuple(records), decoder.pending)
