"""A cable between two hosts that are network namespaces of this machine, for tests that pull it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path

CLONE_NEWNET = 0x40000000


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


class Cable:
    """Two namespaces, "hosts" 0 and 1, with a virtual cable between them and nothing else."""

    def __init__(self) -> None:
        name = secrets.token_hex(3)
        self.hosts = [f"sparkjax-{name}-{end}" for end in (0, 1)]
        self.addresses = ["10.213.7.1", "10.213.7.2"]

    def lay(self) -> None:
        for host in self.hosts:
            ip("netns", "add", host)
            ip("-n", host, "link", "set", "lo", "up")
        one, two = self.hosts
        ip(
            "link",
            "add",
            "cable",
            "netns",
            one,
            "type",
            "veth",
            "peer",
            "name",
            "cable",
            "netns",
            two,
        )
        for host, address in zip(self.hosts, self.addresses, strict=True):
            ip("-n", host, "address", "add", f"{address}/24", "dev", "cable")
            ip("-n", host, "link", "set", "cable", "up")

    def pull(self) -> None:
        """Cuts the hosts off from each other: nothing arrives any more, and nobody is told."""
        ip("-n", self.hosts[1], "link", "set", "cable", "down")

    def remove(self) -> None:
        for host in self.hosts:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "delete", host)

    @contextlib.contextmanager
    def host(self, which: int) -> Iterator[None]:
        """In here this thread opens sockets, and starts processes, on that host."""
        libc = ctypes.CDLL(None, use_errno=True)
        back = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        there = os.open(Path("/run/netns") / self.hosts[which], os.O_RDONLY)
        try:
            if libc.setns(there, CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
            yield
        finally:
            libc.setns(back, CLONE_NEWNET)
            os.close(back)
            os.close(there)


@contextlib.contextmanager
def cable() -> Iterator[Cable]:
    """Raises OSError or CalledProcessError where this process may not make network namespaces."""
    made = Cable()
    try:
        made.lay()
        yield made
    finally:
        made.remove()
