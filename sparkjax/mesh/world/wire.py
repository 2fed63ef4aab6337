"""Messages between two ranks over TCP: typed, length-capped, and from nobody else.

A connection begins with 16 bytes that name the protocol and 32 random bytes from each side. From
these and the shared secret both derive one key a direction. A frame is a big-endian uint32 length,
16 bytes of HMAC-SHA256 over (key; the frame's number, its length, the payload), and the payload, a
message in MessagePack. So a stranger's bytes, a damaged frame and one that was recorded (from this
connection or another) all fail the check, and the connection is closed; nothing else happens.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import socket
import struct
import threading
import time

import msgspec

from .messages import Message

PROTOCOL = b"sparkjax-world/1"
NONCE = 32
MAC = 16
MAX_FRAME = 72 << 20
"""The largest payload in bytes: a journal frame and its envelope."""
STRANGER_FRAME = 64 << 10
"""The largest first payload."""
_HEAD = struct.Struct(">I16s")
_NUMBER = struct.Struct(">QI")
_PIECE = 1 << 20
_FOREVER = 1e6
"""Seconds. Not None: a socket without a limit blocks, and so would sends, since a descriptor's copy has
the same O_NONBLOCK."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


class WireError(ConnectionError):
    """The connection is of no more use; the message says why."""


class Channel:
    """One end of an authenticated connection. `send` from any thread, `receive` from one.

    Args:
      sock: connected; owned from now on.
      secret: the same on both ends.
      server: whether this end accepted the connection.
      seconds: how long the other end may take for its first bytes and for every send.

    Raises:
      WireError: the other end speaks another protocol.
    """

    def __init__(self, sock: socket.socket, secret: bytes, server: bool, seconds: float = 10.0):
        self._socket = sock
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(seconds)
        # A second descriptor has a time limit of its own: reads may wait while sends may not.
        self._out = sock.dup()
        self._out.settimeout(seconds)
        self._lock = threading.Lock()
        self._sent = self._received = 0
        self._cap = STRANGER_FRAME if server else MAX_FRAME
        try:
            mine = os.urandom(NONCE)
            self._out.sendall(PROTOCOL + mine)
            hello = self._read(len(PROTOCOL) + NONCE, time.monotonic() + seconds)
        except OSError as error:
            self.close()
            raise WireError(f"no greeting: {error}") from error
        if hello[: len(PROTOCOL)] != PROTOCOL:
            self.close()
            raise WireError("the other end speaks another protocol")
        theirs = hello[len(PROTOCOL) :]
        nonces = theirs + mine if server else mine + theirs
        keys = [
            hmac.new(secret, way + nonces, hashlib.sha256).digest()
            for way in (b"to client", b"to server")
        ]
        self._out_key, self._in_key = keys if server else keys[::-1]

    def patience(self, seconds: float) -> None:
        """How long the other end may take for a send from now on."""
        self._out.settimeout(seconds)

    def send(self, message: Message, wait: bool = True) -> None:
        """Sends a message; not `wait`: or nothing, while another thread is sending.

        Raises:
          WireError: the other end is gone or takes nothing.
        """
        payload = _encoder.encode(message)
        if len(payload) > MAX_FRAME:
            raise ValueError(f"a message of {len(payload)} bytes; the most is {MAX_FRAME}")
        if not self._lock.acquire(blocking=wait):
            return
        try:
            head = _HEAD.pack(len(payload), self._mac(self._out_key, self._sent, payload))
            self._sent += 1
            self._out.sendall(head + payload)
        except OSError as error:
            raise WireError(f"cannot send: {error}") from error
        finally:
            self._lock.release()

    def receive(self, seconds: float | None = None) -> Message:
        """The next message.

        Args:
          seconds: how long it may take; None is for ever.

        Raises:
          WireError: closed, damaged, forged, too large, or too late.
        """
        until = None if seconds is None else time.monotonic() + seconds
        try:
            length, mac = _HEAD.unpack(self._read(_HEAD.size, until))
            if length > self._cap:
                raise WireError(f"a message of {length} bytes; the most is {self._cap}")
            payload = self._read(length, until)
        except WireError:
            raise
        except OSError as error:
            raise WireError(f"cannot receive: {error}") from error
        if not hmac.compare_digest(mac, self._mac(self._in_key, self._received, payload)):
            raise WireError("a message that was not made with this world's secret for this place")
        self._received += 1
        self._cap = MAX_FRAME
        try:
            return _decoder.decode(payload)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise WireError(f"not a message: {error}") from error

    def close(self) -> None:
        """Closes the connection; a thread that waits in `receive` gets a WireError."""
        for sock in (self._socket, self._out):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    @staticmethod
    def _mac(key: bytes, number: int, payload: bytes) -> bytes:
        signed = _NUMBER.pack(number, len(payload)) + payload
        return hmac.new(key, signed, hashlib.sha256).digest()[:MAC]

    def _read(self, count: int, until: float | None) -> bytes:
        """`count` bytes; memory grows with what has come, not with what was promised."""
        data = bytearray()
        while len(data) < count:
            left = _FOREVER if until is None else until - time.monotonic()
            self._socket.settimeout(max(left, 0.001))
            piece = self._socket.recv(min(count - len(data), _PIECE))
            if not piece:
                raise WireError("closed by the other end")
            data += piece
        return bytes(data)
