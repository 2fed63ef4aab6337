"""The fabric before it carries anything: layouts, devices, settings, and what is said of mistakes."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

import pytest

from sparkjax.config import ConfigError, load
from sparkjax.mesh.transports import TransportError
from sparkjax.mesh.transports.fabric import check, measure, native, topology, verbs
from sparkjax.mesh.transports.fabric.devices import Device, DeviceError, Gid, choose
from sparkjax.mesh.transports.fabric.transport import Settings


@pytest.mark.parametrize(
    "shape, ranks", [("direct", 2), ("direct", 4), ("direct", 6), ("ring", 3), ("ring", 4)]
)
@pytest.mark.parametrize("rails", [1, 2])
def test_every_rank_is_reached_and_every_link_has_two_ends(shape: str, ranks: int, rails: int):
    layouts = [topology.layout(shape, rank, ranks, rails) for rank in range(ranks)]
    for rank, layout in enumerate(layouts):
        assert len(layout.links) == rails * (2 if shape == "ring" else ranks - 1)
        assert {link.port for link in layout.links} == set(range(topology.ports(shape, rails)))
        for link in layout.links:
            back = [x for x in layouts[link.peer].links if (x.peer, x.rail) == (rank, link.rail)]
            assert len(back) == 1
        for target in range(ranks):
            if target == rank:
                continue
            for number, first in enumerate(layout.paths[target]):
                near = layout.links[first].peer
                if near != target:  # then the neighbour passes it on, as the same path
                    relays = [r for r in layouts[near].relays
                              if (r.origin, r.target, r.path) == (rank, target, number)]  # fmt: skip
                    assert len(relays) == 1
                    assert layouts[near].links[relays[0].link].peer == target


@pytest.mark.parametrize(
    "sets, said",
    [
        (["mesh.shape=ring"], "mesh.shape is ring with 2 ranks; allowed: 3 or 4"),
        (["mesh.devices=a,b"], "mesh.devices names 2 devices; mesh.shape and mesh.rails want 1"),
        (["mesh.rails=2", "mesh.devices=a,a"], "mesh.devices is ['a', 'a']; allowed: different"),
        (["mesh.rails=3"], "mesh.rails"),
        (["mesh.transport=fabrics"], "mesh.transport"),
    ],
)
def test_settings_that_do_not_go_together_are_named(sets: list[str], said: str):
    two = ["mesh.peers=a:1,b:1", "mesh.tensor_parallel=2", "mesh.transport=fabric"]
    with pytest.raises(ConfigError) as caught:
        load(overrides=[*two, *sets], environ={})
    assert any(said in line for line in caught.value.problems)


def device(name: str, *addresses: str, place: str = "", active: bool = True) -> Device:
    gids = [Gid(0, "fe80:0000:0000:0000:0000:0000:0000:0001", True)]
    for at, address in enumerate(addresses):
        words = "".join(f"{int(x):02x}" for x in address.split("."))
        value = f"0000:0000:0000:0000:0000:ffff:{words[:4]}:{words[4:]}"
        gids += [Gid(2 * at + 1, value, False), Gid(2 * at + 2, value, True)]
    return Device(name, active, 4096, tuple(gids), place)


SPARK = [
    device("rocep1s0f0", "10.100.0.1", place="0000:01:00.0"),
    device("rocep1s0f1", place="0000:01:00.1", active=False),
    device("roceP2p1s0f0", "10.101.0.1", place="0002:01:00.0"),
    device("roceP2p1s0f1", place="0002:01:00.1", active=False),
]


def test_the_device_of_the_address_and_its_other_function_are_found():
    (first, gid), (second, other) = choose(SPARK, "10.100.0.1", (), 2)
    assert (first.name, gid.index, second.name, other.index) == ("rocep1s0f0", 2, "roceP2p1s0f0", 2)
    assert [d.name for d, _ in choose(SPARK, "10.101.0.1", (), 1)] == ["roceP2p1s0f0"]
    named = choose(SPARK, "10.100.0.1", ("roceP2p1s0f0", "rocep1s0f0"), 2)
    assert [d.name for d, _ in named] == ["roceP2p1s0f0", "rocep1s0f0"]


@pytest.mark.parametrize(
    "found, address, names, ports, said",
    [
        ([], "10.0.0.1", (), 1, "this host has no RDMA device"),
        (SPARK, "10.0.0.9", (), 1, "no RDMA device has a RoCE v2 GID of 10.0.0.9"),
        (SPARK[:2], "10.100.0.1", (), 2, "the other PCIe function of rocep1s0f0 was not found"),
        (SPARK, "10.100.0.1", ("mlx5_0",), 1, "mesh.devices: 'mlx5_0' is not here; there is"),
        (SPARK, "10.100.0.1", ("rocep1s0f1",), 1, "rocep1s0f1: the port is not active"),
        ([device("x")], "10.0.0.1", ("x",), 1, "x has no IPv4 RoCE v2 GID"),
    ],
)
def test_devices_that_do_not_serve_are_named(found, address, names, ports, said: str):
    with pytest.raises(DeviceError, match=re.escape(said)):
        choose(found, address, names, ports)


def test_mistakes_of_memory_and_mtu_are_named():
    assert "8192 KiB of memory may be locked and 9216 KiB are needed" in check.memory(
        9 << 20, 8 << 20
    )
    assert check.memory(9 << 20, None) == check.memory(1, 1) == ""
    assert "MTU of 4096 bytes and the other end of 1024" in measure.slow_mtu("x", 4096, 1024)
    assert "set the interface's MTU to 9000" in measure.slow_mtu("x", 1024, 1024)
    assert measure.slow_mtu("x", 4096, 4096) == ""


def test_slow_rails_are_loud():
    good = measure.Speed(0, "a", 2e-5, 4e-5, 12e9)
    bad = measure.Speed(1, "b", 2e-5, 4e-5, 3e9)
    both = measure.Speed(-1, "", 2e-5, 4e-5, 23e9)
    assert measure.problems([good, both]) == []
    slow, none = measure.problems([good, bad, measure.Speed(-1, "", 2e-5, 4e-5, 12e9)])
    assert slow.startswith("rail 1 (b): 8 KiB in 20 us, 48 KiB in 40 us, 4 MiB at 3 GB/s is slow")
    assert none.startswith("all rails: ") and "no better than one rail" in none


def test_senders_are_paced_where_a_switch_may_drop():
    assert Settings().pace(2) == Settings(shape="ring").pace(4) == 0
    assert Settings().pace(3) == 3.5e9
    assert Settings(pace_gbps=8.0).pace(2) == 1e9


def test_a_pyverbs_of_another_python_is_named(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "pyverbs", raising=False)
    with pytest.raises(TransportError, match="apt-get install python3-pyverbs"):
        verbs.load(tmp_path)
    (tmp_path / "pyverbs").mkdir()
    (tmp_path / "pyverbs" / "__init__.py").touch()
    (tmp_path / "pyverbs" / "device.cpython-38-x86_64-linux-gnu.so").touch()
    with pytest.raises(TransportError, match=r"is for Python 3\.8, and this is 3\.\d+: make the"):
        verbs.load(tmp_path)


def test_a_device_of_no_pci_slot_has_no_place(tmp_path: Path):
    (tmp_path / "0002:01:00.0").mkdir()
    (tmp_path / "card").mkdir()
    (tmp_path / "card" / "device").symlink_to(tmp_path / "0002:01:00.0")
    assert verbs.place("card", tmp_path) == "0002:01:00.0"
    assert verbs.place("rxe0", tmp_path) == ""


def test_a_host_says_what_is_wrong_with_its_links(monkeypatch):
    monkeypatch.setattr(verbs, "devices", list)
    monkeypatch.setattr(verbs, "locked_limit", lambda: 64 << 10)
    monkeypatch.setattr(native, "verbs_flags", tuple)
    _, problems = check.look("10.100.0.1", 2, "direct", 2, ())
    assert [re.sub(r"\d+ KiB are", "N KiB are", p) for p in problems] == [
        "fabric: /usr/include/infiniband/verbs.h is not here (apt-get install libibverbs-dev)",
        "fabric: 64 KiB of memory may be locked and N KiB are needed: set memlock to unlimited in "
        "/etc/security/limits.d (LimitMEMLOCK=infinity under systemd)",
        "mesh.transport is fabric; this host has no RDMA device",
    ]
    monkeypatch.undo()
    slow = [dataclasses.replace(d, mtu=1024) for d in SPARK]
    monkeypatch.setattr(verbs, "devices", lambda: slow)
    facts, problems = check.look("10.100.0.1", 2, "direct", 2, ())
    assert facts["fabric rail 1 RDMA MTU"] == "1024"
    assert "roceP2p1s0f0 has an RDMA MTU of 1024 bytes" in problems[-1]
