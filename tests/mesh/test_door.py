"""A door that takes connections, whatever happens to it."""

from __future__ import annotations

import errno
import os
import socket
import threading

import pytest

from sparkjax.mesh.world import door, roster


class Short(socket.socket):
    """A listener that has no descriptor left for its first connection."""

    tries = 0

    def accept(self):
        self.tries += 1
        if self.tries == 1:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


def test_a_door_without_descriptors_opens_again_and_ends_when_it_is_shut(monkeypatch, caplog):
    monkeypatch.setattr(door, "PAUSE", 0.0)
    seen = threading.Event()

    def serve(sock: socket.socket) -> None:
        sock.close()
        seen.set()

    with Short() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        keeper = threading.Thread(target=door.admit, args=(listener, serve))
        keeper.start()
        with socket.create_connection(listener.getsockname()):
            assert seen.wait(30)
        assert "could not be taken: Too many open files" in caplog.text
        listener.shutdown(socket.SHUT_RDWR)
        keeper.join(30)
        assert not keeper.is_alive()


@pytest.mark.parametrize("port", ["²", "٣٣", "-1", "0", "65536", ""])
def test_a_port_is_written_in_digits(port: str):
    with pytest.raises(roster.RosterError, match="no port from 1 to 65535"):
        roster.parse(f"spark-1:{port}")
