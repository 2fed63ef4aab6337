"""Worlds in one process: forming, agreeing, the journal's way, and everybody who should not be there."""

from __future__ import annotations

import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sparkjax.mesh.world import compare, roster, wire
from sparkjax.mesh.world.messages import Beat, Hello, Record
from sparkjax.mesh.world.roster import Address
from sparkjax.mesh.world.world import World, WorldError

SECRET = b"a secret of sixteen bytes or more"


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def places(ranks: int) -> list[Address]:
    port = free_port()
    return [Address("127.0.0.1", port + rank) for rank in range(ranks)]


def together(work: Callable[[int], Any], ranks: int) -> list[Any]:
    """`work(rank)` of every rank at the same time; a failure is its result."""

    def one(rank: int) -> Any:
        try:
            return work(rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(one, range(ranks)))


@pytest.fixture
def form() -> Iterator[Callable[..., list[World]]]:
    """Forms worlds, and ends them after the test."""
    made: list[World] = []

    def make(ranks: int, **options: Any) -> list[World]:
        at = places(ranks)
        worlds = together(lambda r: World.form(at, r, SECRET, join=30, **options), ranks)
        assert all(isinstance(w, World) for w in worlds), worlds
        made.extend(worlds)
        return worlds

    yield make
    for world in made:
        world.ended = True
        world.close()


def eventually(what: Callable[[], Any], seconds: float = 20.0) -> Any:
    until = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < until
        threading.Event().wait(0.01)
    return found


def test_ranks_come_late_and_in_any_order_and_decide_together():
    at = places(4)
    order = random.Random(5)

    def come(rank: int) -> Any:
        threading.Event().wait(order.uniform(0, 0.5))
        world = World.form(at, rank, SECRET, join=30)
        first = world.exchange("names", str(rank).encode(), lambda data: b",".join(data))
        second = world.exchange(
            "again", b"x" * rank, lambda data: str([len(d) for d in data]).encode()
        )
        if rank == 0:
            world.finish()
        else:
            assert list(world.frames()) == []
        world.close()
        return first, second

    assert together(come, 4) == [(b"0,1,2,3", b"[0, 1, 2, 3]")] * 4


def test_a_difference_is_printed_field_by_field_on_every_rank(form):
    worlds = form(3)
    facts = [{"config engine.slots": "8", "version jax": "0.11.2", "same": "1"} for _ in worlds]
    facts[2]["config engine.slots"] = "16"
    facts[0]["only here"] = "x"
    found = together(
        lambda r: worlds[r].exchange("facts", compare.encode(facts[r]), compare.agree), 3
    )
    for error in found:
        assert isinstance(error, WorldError)
        assert error.problems[1:] == (
            "config engine.slots differs: rank 0, 1: 8; rank 2: 16",
            "only here differs: rank 0: x; rank 1, 2: (none)",
        )


def test_records_arrive_in_order_and_the_end_is_in_order(form):
    worlds = form(3)
    frames = [os.urandom(random.Random(i).randrange(1, 200_000)) for i in range(50)]
    readers = [ThreadPoolExecutor(1).submit(lambda w=w: list(w.frames())) for w in worlds[1:]]
    for frame in frames:
        worlds[0].publish(frame)
    worlds[0].finish()
    assert [r.result(30) for r in readers] == [frames, frames]
    assert all(w.failure is None for w in worlds)


def test_the_first_failure_is_the_one_that_all_ranks_are_told(form):
    worlds = form(3)
    told: list[str] = []
    worlds[1].on_failure = told.append
    worlds[2].fail("rank 2 has burnt down")
    eventually(lambda: told)
    assert {w.failure for w in worlds} == {"rank 2 has burnt down"}
    assert told == ["rank 2 has burnt down"]
    with pytest.raises(WorldError, match=r"burnt down"):
        worlds[0].publish(b"too late")
    with pytest.raises(WorldError, match=r"burnt down"):
        list(worlds[1].frames())


def test_a_rank_whose_connection_ends_is_named(form):
    worlds = form(3)
    worlds[1].ended = True  # it says nothing more, as if killed
    worlds[1].close()
    reason = eventually(lambda: worlds[2].failure)
    assert reason.startswith("rank 1 (") and "is gone" in reason
    assert worlds[0].failure == reason


def test_a_silent_rank_is_named_within_the_bound(form):
    worlds = form(2, silence=2.0)
    worlds[1].ended = True  # its signs of life end; its connection stays
    begun = time.monotonic()
    reason = eventually(lambda: worlds[0].failure)
    assert reason.startswith("rank 1 (") and "has said nothing for 2." in reason
    assert time.monotonic() - begun < 10


def test_a_rank_that_takes_no_more_bytes_holds_nobody_up():
    """A stopped process whose buffers are full: sends to it have an end, and the others hear of it."""
    at = places(3)
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(World.form, at, 0, SECRET, join=30, silence=1.0)
        good = pool.submit(World.form, at, 2, SECRET, join=30, silence=60.0)
        eventually(lambda: not socket.socket().connect_ex(at[0]))
        stuck = wire.Channel(socket.create_connection(at[0]), SECRET, server=False)
        stuck.send(Hello(1, 3, "here", 1))
        rank0, rank2 = first.result(40), good.result(40)
        publishing = pool.submit(rank0.publish, bytes(16 << 20))
        # Silence or a send that does not go out, whichever is noticed first.
        assert eventually(lambda: rank2.failure).startswith("rank 1 (here, process 1) ")
        assert isinstance(publishing.exception(10), WorldError)
    stuck.close()
    for world in (rank0, rank2):
        world.close()


def test_a_rank_that_dies_while_the_world_forms_may_come_again():
    at = places(3)

    def again() -> World:
        """Refused while rank 0 has not seen the first one go; then its process is started again."""
        while True:
            try:
                return World.form(at, 1, SECRET, join=30)
            except WorldError as error:
                assert "there is a rank 1" in str(error)

    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(World.form, at, 0, SECRET, join=30)
        early = World.form(at, 1, SECRET, join=30)
        early.ended = True
        early.close()
        second = pool.submit(again)
        third = pool.submit(World.form, at, 2, SECRET, join=30)
        worlds = [first.result(40), second.result(40), third.result(40)]
    for world in worlds:
        world.ended = True
        world.close()


def test_who_does_not_come_is_named():
    with pytest.raises(WorldError, match=r"rank 1, 2 did not come in 0 s \(mesh.join_seconds\)"):
        World.form(places(3), 0, SECRET, join=0.2)
    with pytest.raises(WorldError, match=r"rank 0 at 127.0.0.1:.* did not answer"):
        World.form(places(2), 1, SECRET, join=0.3)


def test_who_came_hears_who_did_not():
    at = places(3)

    def one(rank: int) -> None:
        world = World.form(at, rank, SECRET, join=6)
        try:
            world.exchange("compare")
        finally:
            world.close()

    missing = "rank 2 did not come in 6 s"
    assert [missing in str(error) for error in together(one, 2)] == [True, True]


def test_a_late_or_double_rank_is_refused_and_told_why(form):
    worlds = form(2)
    address = Address("127.0.0.1", worlds[0].port)
    with pytest.raises(WorldError, match=r"refused by rank 0: this world is complete"):
        World.form([address, address], 1, SECRET, join=5)
    with pytest.raises(WorldError, match=r"has ranks 0 to 1; that is rank 3 of 4"):
        World.form([address] * 4, 3, SECRET, join=5)
    assert worlds[0].failure is None


def strangers(port: int) -> Iterator[bytes]:
    """What comes to an open port."""
    rng = random.Random(11)
    yield b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    yield b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
    yield b""
    yield wire.PROTOCOL
    greeting = wire.PROTOCOL + bytes(wire.NONCE)
    yield greeting + struct.pack(">I", 0xFFFFFFFF) + bytes(16)
    yield greeting + struct.pack(">I", wire.STRANGER_FRAME) + bytes(16) + bytes(100)
    yield greeting + struct.pack(">I", 10) + bytes(26)
    for _ in range(40):
        head = greeting if rng.random() < 0.5 else b""
        yield head + rng.randbytes(rng.randrange(2000))


def test_garbage_is_dropped_and_the_world_goes_on(form):
    worlds = form(2)
    port = worlds[0].port
    for data in strangers(port):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
            sock.sendall(data)
    worlds[0].publish(b"still here")
    frames = worlds[1].frames()
    assert next(frames) == b"still here"
    assert worlds[0].failure is None and worlds[1].failure is None
    # A wrong secret is a stranger, too.
    with pytest.raises(WorldError, match=r"is mesh.secret the same file there"):
        World.form([Address("127.0.0.1", port)] * 2, 1, b"another secret, long enough", join=0.5)
    assert worlds[0].failure is None


def pair(secret: bytes = SECRET) -> tuple[wire.Channel, wire.Channel, socket.socket, socket.socket]:
    """Two channels with a man in the middle: (server, client, his ends to both)."""
    door = socket.create_server(("127.0.0.1", 0))
    ends = []
    for _ in range(2):
        near = socket.create_connection(door.getsockname())
        ends.append((near, door.accept()[0]))
    (server_sock, to_server), (client_sock, to_client) = ends
    with ThreadPoolExecutor(2) as pool:
        server = pool.submit(wire.Channel, server_sock, secret, True)
        client = pool.submit(wire.Channel, client_sock, secret, False)
        size = len(wire.PROTOCOL) + wire.NONCE
        to_client.sendall(to_server.recv(size, socket.MSG_WAITALL))
        to_server.sendall(to_client.recv(size, socket.MSG_WAITALL))
        found = server.result(10), client.result(10), to_server, to_client
    door.close()
    return found


def test_replayed_reordered_and_changed_frames_are_refused():
    hello = Hello(1, 2, "here", 1)
    for attack in ("none", "replay", "reflect", "flip"):
        server, client, to_server, to_client = pair()
        client.send(hello)
        first = to_client.recv(65536)
        client.send(Record(b"payload"))
        second = to_client.recv(65536)
        to_server.sendall(first)
        assert server.receive(5) == hello
        if attack == "none":
            to_server.sendall(second)
            assert server.receive(5) == Record(b"payload")
            server.send(Beat("x", 1))
            to_client.sendall(to_server.recv(65536))
            assert client.receive(5) == Beat("x", 1)
        else:
            if attack == "replay":
                to_server.sendall(first)
            elif attack == "reflect":
                server.send(Beat("x", 1))
                to_server.sendall(to_server.recv(65536))
            else:
                to_server.sendall(second[:-1] + bytes([second[-1] ^ 1]))
            with pytest.raises(wire.WireError, match=r"secret|not a message"):
                server.receive(5)
        for end in (server, client, to_server, to_client):
            end.close()


def test_a_recorded_connection_does_not_open_another_one(form):
    """Every connection has keys of its own, from both sides' random bytes."""
    server, client, _, to_client = pair()
    client.send(Hello(1, 2, "here", 1))
    recorded = to_client.recv(65536)
    for end in (server, client):
        end.close()
    worlds = form(2)
    port = worlds[0].port
    with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
        sock.sendall(wire.PROTOCOL + bytes(wire.NONCE) + recorded)
        while sock.recv(4096):
            pass
    assert worlds[0].failure is None


def test_peers_are_parsed_and_wrong_ones_named():
    assert roster.parse("10.0.0.1") == Address("10.0.0.1", 29970)
    assert roster.parse("spark-1:3000") == Address("spark-1", 3000)
    assert roster.parse("[fe80::1]:3000") == Address("fe80::1", 3000)
    assert str(Address("fe80::1", 3000)) == "[fe80::1]:3000"
    for wrong in ("", ":1", "x:", "x:0", "x:70000", "x:y", "0.0.0.0:1", "[::1"):
        with pytest.raises(roster.RosterError, match=r"mesh.peers"):
            roster.parse(wrong)


def test_the_rank_comes_from_the_address_or_is_asked_for():
    assert roster.own_rank(("198.51.100.1", "127.0.0.1", "198.51.100.2"), None) == 1
    assert roster.own_rank(("127.0.0.1:1", "127.0.0.1:2"), 1) == 1
    with pytest.raises(roster.RosterError, match=r"several of mesh.peers .* --rank"):
        roster.own_rank(("127.0.0.1:1", "127.0.0.1:2"), None)
    with pytest.raises(roster.RosterError, match=r"none of mesh.peers"):
        roster.own_rank(("198.51.100.1", "198.51.100.2"), None)
    with pytest.raises(roster.RosterError, match=r"mesh.rank is 2; mesh.peers has ranks 0 to 1"):
        roster.own_rank(("127.0.0.1:1", "127.0.0.1:2"), 2)


def test_a_secret_is_needed_between_hosts_and_must_be_kept(tmp_path):
    assert roster.read_secret(None, ("127.0.0.1:1", "localhost:2")) == b""
    with pytest.raises(roster.RosterError, match=r"mesh.secret is not set"):
        roster.read_secret(None, ("127.0.0.1:1", "198.51.100.1"))
    file = tmp_path / "secret"
    with pytest.raises(roster.RosterError, match=r"No such file"):
        roster.read_secret(str(file), ())
    file.write_text("short\n")
    file.chmod(0o600)
    with pytest.raises(roster.RosterError, match=r"holds 5 bytes"):
        roster.read_secret(str(file), ())
    file.write_text("long enough to be one\n")
    assert roster.read_secret(str(file), ()) == b"long enough to be one"
    file.chmod(0o644)
    with pytest.raises(roster.RosterError, match=r"can be read by others"):
        roster.read_secret(str(file), ())
