"""Taking connections from whoever comes, a few at a time."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

STRANGERS = 16
"""Connections that have not said who they are, at a time."""
PAUSE = 0.2
"""Seconds until the next try where the system has no descriptor or memory left."""


def admit(door: socket.socket, serve: Callable[[socket.socket], None]) -> None:
    """Serves every connection in a thread of its own until the door is closed or shut down; those that
    come while STRANGERS are served are closed unheard.

    Args:
      door: a listening socket.
      serve: owns its connection. ValueError and OSError (WireError is one) end it without harm.
    """
    free = threading.BoundedSemaphore(STRANGERS)

    def one(sock: socket.socket, host: str) -> None:
        try:
            serve(sock)
        except (ValueError, OSError) as error:
            log.debug("a stranger from %s: %s", host, error)
            sock.close()
        finally:
            free.release()

    while True:
        try:
            sock, where = door.accept()
        except OSError as error:
            if not _listens(door):
                return
            log.warning("a connection could not be taken: %s", error.strerror)
            time.sleep(PAUSE)
            continue
        if not free.acquire(blocking=False):
            sock.close()
            continue
        threading.Thread(target=one, args=(sock, where[0]), name="stranger", daemon=True).start()


def _listens(door: socket.socket) -> bool:
    try:
        return bool(door.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:
        return False
