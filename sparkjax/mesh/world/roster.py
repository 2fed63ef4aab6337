"""Who the ranks are: addresses of `mesh.peers`, and which of them this host is."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path
from typing import NamedTuple

PORT = 29970
"""Where rank 0 listens, unless its peer names another port."""


class RosterError(ValueError):
    """The peers do not say who this is, or cannot be used; names the setting."""


class Address(NamedTuple):
    """A rank's place."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse(peer: str) -> Address:
    """ "host", "host:port" or "[v6]:port". Raises RosterError."""
    host, colon, port = peer, "", ""
    if peer.startswith("["):
        host, bracket, rest = peer[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise RosterError(f"mesh.peers: {peer!r} is not [address]:port")
        colon, port = rest[:1], rest[1:]
    elif peer.count(":") <= 1:
        host, colon, port = peer.partition(":")
    if colon and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise RosterError(f"mesh.peers: {peer!r} has no port from 1 to 65535")
    if not host or host in ("0.0.0.0", "::"):
        raise RosterError(f"mesh.peers: {peer!r} names no one host")
    return Address(host, int(port) if colon else PORT)


def is_here(host: str) -> bool:
    """Whether `host` is an address of this machine: only then can a socket be bound to it."""
    try:
        places = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, where in places:
        try:
            with socket.socket(family, kind, protocol) as sock:
                sock.bind(where)
            return True
        except OSError:
            continue
    return False


def is_loopback(host: str) -> bool:
    """Whether nobody outside this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def own_rank(peers: tuple[str, ...], rank: int | None) -> int:
    """This host's rank: `rank` where it is given, else the peer whose address is here.

    Raises:
      RosterError: none or several are, or the rank is not one of the peers.
    """
    addresses = [parse(peer) for peer in peers]
    if rank is not None:
        if rank >= len(peers):
            raise RosterError(f"mesh.rank is {rank}; mesh.peers has ranks 0 to {len(peers) - 1}")
        return rank
    here = [at for at, address in enumerate(addresses) if is_here(address.host)]
    if len(here) == 1:
        return here[0]
    what = "none" if not here else "several"
    raise RosterError(
        f"{what} of mesh.peers ({', '.join(peers)}) is an address of this host; "
        "say which one with --rank"
    )


def read_secret(path: str | None, peers: tuple[str, ...]) -> bytes:
    """The shared secret of `mesh.secret`; none is needed where all peers are on this machine.

    Raises:
      RosterError: no file where one is needed, or one that others can read or that is too short.
    """
    if path is None:
        if all(is_loopback(parse(peer).host) for peer in peers):
            return b""
        raise RosterError(
            "mesh.secret is not set: ranks on other hosts need a shared secret "
            "(openssl rand -base64 32 > FILE, the same file on every host)"
        )
    file = Path(path)
    try:
        secret = file.read_bytes().strip()
        mode = file.stat().st_mode
    except OSError as error:
        raise RosterError(f"mesh.secret: {path}: {error.strerror}") from error
    if mode & 0o077:
        raise RosterError(f"mesh.secret: {path} can be read by others (chmod 600 {path})")
    if len(secret) < 16:
        raise RosterError(f"mesh.secret: {path} holds {len(secret)} bytes; at least 16 are needed")
    return secret
