"""`fabric`: one rank's end of a world whose collectives go over RDMA."""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import socket
from collections.abc import Callable
from typing import ClassVar

import msgspec

from .. import TransportError
from ..calls import MESSAGE, Calls
from . import devices, measure, native, topology, verbs

log = logging.getLogger("sparkjax")

WINDOW = 2
SLOT_BYTES = 512 << 10
"""Payload of one piece; larger arrays go in several, WINDOW of them under way at a time."""
SWITCH_PACE = 28.0
"""Gb/s of a link where several ranks may send to one port of a switch at a time: faster than this
the switch drops, and a reliable queue pair takes long to mend that."""

Exchange = Callable[[str, bytes], list[bytes]]
"""(stage, this rank's bytes) -> every rank's, in rank order: the world's wire."""

_ends: dict[int, verbs.Ends] = {}


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The part of `mesh` that says how the boxes are cabled."""

    shape: str = "direct"
    rails: int = 1
    devices: tuple[str, ...] = ()
    pace_gbps: float | None = None
    proxy_core: int | None = None

    def pace(self, ranks: int) -> float:
        """Bytes a second of each link; 0 is as fast as it goes."""
        if self.pace_gbps is not None:
            return self.pace_gbps * 1e9 / 8
        return SWITCH_PACE * 1e9 / 8 if self.shape == "direct" and ranks > 2 else 0.0


@dataclasses.dataclass(frozen=True)
class Fabric(Calls):
    """See `Transport` for its methods."""

    PREFIX: ClassVar[str] = native.TARGET

    @classmethod
    def open(
        cls,
        exchange: Exchange,
        rank: int,
        ranks: int,
        host: str,
        settings: Settings,
        *,
        timeout: float = 30.0,
        window: int = WINDOW,
        slot_bytes: int = SLOT_BYTES,
        epoch: int = 0,
        platform: str = "cpu",
        measured: bool = True,
    ) -> Fabric:
        """Connects this rank with the others, and measures every rail.

        Args:
          exchange: carries a few hundred bytes a rank between all.
          host: this rank's address in mesh.peers.
          timeout: seconds that a collective waits for another rank.
          window, slot_bytes: pieces under way at a time, and their payload.
          epoch: the first piece's number (tests begin in front of its wrap).
          platform: "cpu" or "cuda", where the programs run.
          measured: whether rails are timed.

        Raises:
          TransportError: naming the rank, and the device or the setting.
        """
        try:
            layout = topology.layout(settings.shape, rank, ranks, settings.rails)
            library = native.load(platform)
            if not native.verbs_flags():
                raise TransportError(
                    f"fabric: {native.VERBS} is not here (apt-get install libibverbs-dev)"
                )
            ports = topology.ports(settings.shape, settings.rails)
            chosen = devices.choose(verbs.devices(), ipv4(host), settings.devices, ports)
        except ValueError as error:
            raise TransportError(f"fabric: rank {rank}: {error}") from error
        handle = native.open_world(
            library, layout, rank, ranks,
            names=tuple(chosen[link.port][0].name for link in layout.links), window=window,
            slot_bytes=slot_bytes, seconds=timeout, bytes_a_second=settings.pace(ranks), epoch=epoch,
        )  # fmt: skip
        fabric = cls(rank, ranks, handle, platform)
        try:
            ends = _ends[handle] = verbs.Ends(
                library, library.sparkjax_fabric_base(handle),
                library.sparkjax_fabric_bytes(handle), chosen,
            )  # fmt: skip
            mine = [ends.create(link.peer, link.rail, link.port) for link in layout.links]
            brought = exchange("fabric ends", msgspec.msgpack.encode(mine))
            faces = [msgspec.msgpack.decode(data, type=list[verbs.Face]) for data in brought]
            connected = []
            for at, face in enumerate(mine):
                theirs = other_end(faces, rank, face)
                connected.append(ends.connect(at, face, theirs))
                if said := measure.slow_mtu(face.device, face.mtu, theirs.mtu):
                    log.warning("fabric: rank %d: %s", rank, said)
            library.sparkjax_fabric_connect(
                handle, (native.End * len(connected))(*connected), len(connected)
            )
            # Nobody writes before the other end is ready to receive.
            exchange("fabric connected", b"")
            if measured:
                fabric.patience(measure.PATIENCE)
                near = layout.links[0].peer
                rails = [link.port for link in layout.links if link.peer == near]
                fabric.measure([chosen[port][0].name for port in rails])
                fabric.patience(timeout)
            message = ctypes.create_string_buffer(MESSAGE)
            core = -1 if settings.proxy_core is None else settings.proxy_core
            library.sparkjax_fabric_start(handle, core, message, len(message))
            if message.value:
                raise TransportError(f"fabric: rank {rank}: {message.value.decode()}")
        except BaseException:
            fabric.close()
            raise
        return fabric

    def measure(self, names: list[str]) -> None:
        """Times the rails, of these devices, and says how fast they are and what is slow."""
        speeds = measure.rails(self._library(), self.handle, names, self.ranks)
        for speed in speeds:
            log.info("fabric: rank %d: %s", self.rank, speed)
        for line in measure.problems(speeds):
            log.warning("fabric: rank %d: %s", self.rank, line)

    def close(self) -> None:
        """Leaves the world when what was written has gone."""
        self._library().sparkjax_fabric_close(self.handle, 1.0)
        if ends := _ends.pop(self.handle, None):
            ends.close()

    def break_link(self, link: int) -> None:
        """Breaks one of this rank's links, as a fault would (for tests)."""
        _ends[self.handle].break_pair(link)

    def _library(self) -> ctypes.CDLL:
        return native.load(self.platform)


def ipv4(host: str) -> str:
    """The IPv4 address of an entry of mesh.peers. Raises ValueError."""
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise ValueError(f"mesh.peers: {host} is no IPv4 address or name: {error}") from error


def other_end(faces: list[list[verbs.Face]], rank: int, mine: verbs.Face) -> verbs.Face:
    """What rank `mine.peer` made for this link. Raises TransportError."""
    for face in faces[mine.peer]:
        if (face.peer, face.rail) == (rank, mine.rail):
            return face
    raise TransportError(
        f"fabric: rank {mine.peer} has no rail {mine.rail} towards rank {rank} (mesh.rails, mesh.shape)"
    )
