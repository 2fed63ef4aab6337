"""A world of ranks: it forms, decides together, carries the journal, and notices who is gone.

Rank 0 listens; every other rank connects to it, and nobody else talks to anybody. Each connection
is read by a thread of its own. Everybody says that it is still there every `BEAT` seconds, and a
rank that says nothing for `silence` seconds counts as gone, as does one whose connection ends. Then
the world ends: rank 0 tells every rank which one it was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator

import msgspec

from .door import STRANGERS, admit
from .messages import (
    Arrived,
    Beat,
    Bye,
    Decided,
    Failed,
    Hello,
    Leave,
    Message,
    Record,
    Refused,
    Welcome,
)
from .roster import Address
from .wire import Channel, WireError

log = logging.getLogger(__name__)

BEAT = 0.5
"""Seconds between two signs of life."""
GREETING = 5.0
"""Seconds that a connection has to say who it is."""
FAREWELL = 1.0
"""Seconds that telling all ranks of a failure may take: one that stands still holds nobody up."""


class WorldError(RuntimeError):
    """The world did not form, or has ended; `problems` has one line for each reason."""

    def __init__(self, *problems: str):
        self.problems = problems
        super().__init__("\n".join(problems))


Decide = Callable[[list[bytes]], bytes]
"""What rank 0 makes of every rank's bytes, in rank order; raises WorldError to end the world."""


def nothing(data: list[bytes]) -> bytes:
    """A decision that only waits for everybody."""
    return b""


@dataclasses.dataclass
class _Peer:
    """Another rank, as this one knows it."""

    rank: int
    name: str
    channel: Channel
    heard: float
    stage: str = ""
    applied: int = 0
    left: bool = False


class World:
    """One rank's view. Made by `form`.

    Attributes:
      on_failure: called once, from any thread, with the reason when the world ends in failure.
      on_leave: called on rank 0 when another rank was asked to stop.
    """

    def __init__(self, rank: int, ranks: int, silence: float):
        self.rank, self.ranks, self.silence = rank, ranks, silence
        self.failure: str | None = None
        self.ended = False
        self.on_failure: Callable[[str], None] = lambda reason: None
        self.on_leave: Callable[[str], None] = lambda reason: None
        self.stage = "forming"
        self.applied = 0
        self._peers: dict[int, _Peer] = {}
        self._change = threading.Condition()
        self._arrived: dict[tuple[str, int], bytes] = {}
        self._decided: dict[str, Decided] = {}
        self._records: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._door: socket.socket | None = None

    # --- Forming --------------------------------------------------------------------------------

    @classmethod
    def form(
        cls,
        addresses: list[Address],
        rank: int,
        secret: bytes,
        *,
        join: float = 120.0,
        silence: float = 8.0,
    ) -> World:
        """Meets the other ranks.

        Args:
          addresses: of all ranks; rank 0 listens at its own, and nowhere else.
          join: seconds to wait for all.
          silence: seconds without a sign of life after which a rank counts as gone.

        Raises:
          WorldError: not all came, or this one was refused.
        """
        world = cls(rank, len(addresses), silence)
        try:
            if rank == 0:
                world._listen(addresses[0], secret, join)
            else:
                world._connect(addresses, secret, join)
        except BaseException as error:
            if isinstance(error, WorldError):
                world.fail(str(error))  # those that came hear who did not
            world.close()
            raise
        return world

    def _start(self, work: Callable[..., None], name: str, *args: object) -> threading.Thread:
        thread = threading.Thread(target=work, args=args, name=name, daemon=True)
        thread.start()
        return thread

    def _listen(self, address: Address, secret: bytes, join: float) -> None:
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        door = self._door = socket.socket(family, socket.SOCK_STREAM)
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            door.bind(address)
            door.listen(STRANGERS)
        except OSError as error:
            raise WorldError(f"mesh.peers: cannot listen on {address}: {error.strerror}") from error
        # For as long as the world lives: a late or false one is refused.
        self._start(admit, "world door", door, lambda sock: self._greet(sock, secret))
        self._start(self._watch, "world watch")
        until = time.monotonic() + join
        told = time.monotonic()
        with self._change:
            while len(self._peers) < self.ranks - 1:
                missing = sorted(set(range(1, self.ranks)) - set(self._peers))
                if time.monotonic() > until:
                    who = ", ".join(map(str, missing))
                    raise WorldError(f"rank {who} did not come in {join:.0f} s (mesh.join_seconds)")
                self._change.wait(min(1.0, max(until - time.monotonic(), 0.01)))
                if time.monotonic() - told > 5 and len(self._peers) < self.ranks - 1:
                    told = time.monotonic()
                    log.info("waiting for rank %s", ", ".join(map(str, missing)))
            self.stage = "formed"

    def _greet(self, sock: socket.socket, secret: bytes) -> None:
        channel = Channel(sock, secret, server=True, seconds=GREETING)
        try:
            hello = channel.receive(GREETING)
        except WireError:
            channel.close()
            raise
        refusal = None
        if not isinstance(hello, Hello):
            refusal = "a rank begins with its name"
        elif hello.ranks != self.ranks or not 0 < hello.rank < self.ranks:
            refusal = (
                f"this world has ranks 0 to {self.ranks - 1}; "
                f"that is rank {hello.rank} of {hello.ranks}"
            )
        else:
            peer = _Peer(
                hello.rank,
                f"rank {hello.rank} ({hello.host}, process {hello.pid})",
                channel,
                time.monotonic(),
            )
            with self._change:
                if self.stage != "forming":
                    refusal = "this world is complete: stop it before a rank is started again"
                elif hello.rank in self._peers:
                    refusal = f"there is a {self._peers[hello.rank].name} already"
                else:
                    channel.send(Welcome())  # the first bytes on this way: they never block
                    channel.patience(self.silence)
                    self._peers[hello.rank] = peer
                    self._start(self._read, f"rank {hello.rank}", peer)
                    self._change.notify_all()
        if refusal is not None:
            with contextlib.suppress(WireError):
                channel.send(Refused(refusal))
            channel.close()
            log.warning("a rank was refused: %s", refusal)

    def _connect(self, addresses: list[Address], secret: bytes, join: float) -> None:
        until = time.monotonic() + join
        hello = Hello(self.rank, self.ranks, socket.gethostname(), os.getpid())
        reason = ""
        told = time.monotonic()
        while time.monotonic() < until:
            try:
                left = max(until - time.monotonic(), 0.1)
                sock = socket.create_connection(addresses[0], timeout=min(5.0, left))
                channel = Channel(sock, secret, server=False, seconds=GREETING)
            except OSError as error:
                reason = str(error)
            else:
                try:
                    channel.send(hello)
                    answer = channel.receive(GREETING)
                    break
                except WireError as error:
                    channel.close()
                    reason = f"{error} (is mesh.secret the same file there?)"
            if time.monotonic() - told > 5:
                told = time.monotonic()
                log.info("waiting for rank 0 at %s: %s", addresses[0], reason)
            time.sleep(0.2)
        else:
            raise WorldError(
                f"rank 0 at {addresses[0]} did not answer in {join:.0f} s (mesh.join_seconds): "
                f"{reason}"
            )
        if isinstance(answer, Refused):
            channel.close()
            raise WorldError(f"refused by rank 0: {answer.reason}")
        channel.patience(self.silence)
        peer = self._peers[0] = _Peer(0, f"rank 0 ({addresses[0]})", channel, time.monotonic())
        self.stage = "formed"
        self._start(self._read, "rank 0", peer)
        self._start(self._watch, "world watch")

    # --- Deciding together ------------------------------------------------------------------------

    def exchange(self, stage: str, mine: bytes = b"", decide: Decide = nothing) -> bytes:
        """Waits until every rank has come to `stage`; returns what rank 0 made of what they
        brought. There is no time limit: whoever dies or falls silent ends the world.

        Raises:
          WorldError: rank 0 found problems (the same on every rank), or the world has ended.
        """
        self.stage = stage
        if self.rank:
            self._send(self._peers[0], Arrived(stage, mine))
            with self._change:
                while stage not in self._decided:
                    self._alive()
                    self._change.wait(1.0)
                decided = self._decided.pop(stage)
        else:
            decided = self._decide(stage, mine, decide)
        if decided.problems:
            raise WorldError(*decided.problems)
        return decided.data

    def gather(self, stage: str, mine: bytes) -> list[bytes]:
        """What every rank brought to `stage`, in rank order. Raises WorldError as `exchange`."""
        data = self.exchange(stage, mine, msgspec.msgpack.encode)
        return msgspec.msgpack.decode(data, type=list[bytes])

    def _decide(self, stage: str, mine: bytes, decide: Decide) -> Decided:
        with self._change:
            while any((stage, rank) not in self._arrived for rank in self._peers):
                self._alive()
                self._change.wait(1.0)
            brought = [mine] + [self._arrived.pop((stage, r)) for r in range(1, self.ranks)]
        try:
            decided = Decided(stage, decide(brought))
        except WorldError as error:
            decided = Decided(stage, b"", error.problems)
        for peer in list(self._peers.values()):
            if decided.problems:
                peer.left = True  # it will go, and rightly so
            self._send(peer, decided)
        return decided

    # --- The journal ------------------------------------------------------------------------------

    def publish(self, frame: bytes) -> None:
        """Rank 0: one journal frame to every rank. Raises WorldError once the world has ended."""
        self._alive()
        for peer in list(self._peers.values()):
            self._send(peer, Record(frame))

    def frames(self) -> Iterator[bytes]:
        """Other ranks: journal frames in order, until the world ends in order.

        Raises:
          WorldError: it ended otherwise.
        """
        while (frame := self._records.get()) is not None:
            yield frame
        self._alive()

    # --- Life and death -----------------------------------------------------------------------------

    def fail(self, reason: str) -> None:
        """Ends the world for a reason; the first one stands, and every rank is told it."""
        with self._change:
            if self.failure is not None or self.ended:
                return
            self.failure = reason
            self._change.notify_all()
        log.error("the world ends: %s", reason)

        def tell(peer: _Peer) -> None:
            with contextlib.suppress(WireError, OSError):
                peer.channel.send(Failed(reason))

        until = time.monotonic() + FAREWELL
        for telling in [self._start(tell, "farewell", p) for p in list(self._peers.values())]:
            telling.join(max(until - time.monotonic(), 0.0))
        self._records.put(None)
        self.on_failure(reason)

    def leave(self, reason: str) -> None:
        """A rank other than 0 was asked to stop: asks rank 0 to end the world in order."""
        self._send(self._peers[0], Leave(reason))

    def finish(self) -> None:
        """Rank 0: ends the world in order."""
        with self._change:
            if self.failure is not None:
                return
            self.ended = True
        for peer in list(self._peers.values()):
            with contextlib.suppress(WireError):
                peer.channel.send(Bye())

    def close(self) -> None:
        """Closes all connections."""
        door, self._door = self._door, None
        if door is not None:
            with contextlib.suppress(OSError):
                door.shutdown(socket.SHUT_RDWR)
            door.close()
        for peer in list(self._peers.values()):
            peer.channel.close()

    def states(self) -> list[tuple[int, str, str, int, float]]:
        """(rank, name, stage, records applied, seconds since heard) of every rank known here."""
        now = time.monotonic()
        mine = (self.rank, f"rank {self.rank}", self.stage, self.applied, 0.0)
        return [mine] + [
            (p.rank, p.name, p.stage, p.applied, now - p.heard) for p in list(self._peers.values())
        ]

    @property
    def port(self) -> int:
        """Rank 0: where it listens."""
        assert self._door is not None
        return int(self._door.getsockname()[1])

    def _alive(self) -> None:
        if self.failure is not None:
            raise WorldError(self.failure)

    def _send(self, peer: _Peer, message: Message) -> None:
        try:
            peer.channel.send(message)
        except WireError as error:
            self._lost(peer, f"is gone: {error}")
            self._alive()

    def _read(self, peer: _Peer) -> None:
        try:
            while True:
                self._take(peer, peer.channel.receive())
        except WireError as error:
            self._lost(peer, f"is gone: {error}")

    def _lost(self, peer: _Peer, how: str) -> None:
        """A rank's connection is of no more use. While the world forms, it may come again."""
        if self.ended or peer.left:
            return
        with self._change:
            forming = self.rank == 0 and self.stage == "forming"
            if forming and self._peers.get(peer.rank) is peer:
                del self._peers[peer.rank]
                self._change.notify_all()
        if forming:
            log.warning("%s %s", peer.name, how)
            peer.channel.close()
        else:
            self.fail(f"{peer.name} {how}")

    def _take(self, peer: _Peer, message: Message) -> None:
        peer.heard = time.monotonic()
        match message:
            case Beat(stage, applied):
                peer.stage, peer.applied = stage, applied
            case Record(frame):
                self._records.put(frame)
            case Arrived(stage, data):
                with self._change:
                    self._arrived[stage, peer.rank] = data
                    self._change.notify_all()
            case Decided(stage):
                peer.left = bool(message.problems)
                with self._change:
                    self._decided[stage] = message
                    self._change.notify_all()
            case Failed(reason):
                peer.left = True
                self.fail(reason)
            case Leave(reason):
                self.on_leave(reason)
            case Bye():
                self.ended = peer.left = True
                self._records.put(None)
            case _:
                self.fail(f"{peer.name} said {type(message).__name__} out of turn")

    def _watch(self) -> None:
        last = time.monotonic()
        while self.failure is None and not self.ended:
            gap, last = time.monotonic() - last, time.monotonic()
            for peer in list(self._peers.values()):
                if gap > self.silence / 2:
                    peer.heard += gap  # it was this process that stood still
                silent = time.monotonic() - peer.heard
                if silent > self.silence:
                    self._lost(peer, f"has said nothing for {silent:.1f} s")
                    continue
                try:
                    # What is being sent is a sign of life, too; and nobody waits here for a rank.
                    peer.channel.send(Beat(self.stage, self.applied), wait=False)
                except WireError as error:
                    self._lost(peer, f"is gone: {error}")
            time.sleep(BEAT)
