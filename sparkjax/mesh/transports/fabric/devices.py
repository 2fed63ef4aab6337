"""Which RDMA devices carry a world's links, and under which GID. Pure functions over what is there."""

from __future__ import annotations

import dataclasses
import ipaddress


@dataclasses.dataclass(frozen=True)
class Gid:
    """An entry of a port's table; `value` as eight groups of hexadecimal digits."""

    index: int
    value: str
    roce_v2: bool

    @property
    def address(self) -> str:
        """The IPv4 address that it stands for, or ""."""
        mapped = ipaddress.IPv6Address(self.value).ipv4_mapped
        return str(mapped) if mapped is not None else ""


@dataclasses.dataclass(frozen=True)
class Device:
    """One RDMA device (a PCIe function of one port). `mtu` is the active RDMA MTU in bytes; `place`
    the PCI address, "" where there is none."""

    name: str
    active: bool
    mtu: int
    gids: tuple[Gid, ...]
    place: str = ""

    def gid(self, address: str = "") -> Gid | None:
        """The RoCE v2 entry of an IPv4 address; the first of any address if none is asked for."""
        usable = [g for g in self.gids if g.roce_v2 and g.address]
        return next((g for g in usable if not address or g.address == address), None)


class DeviceError(ValueError):
    """The devices do not carry what the configuration wants; names the field and what there is."""


def choose(
    found: list[Device], address: str, names: tuple[str, ...], ports: int
) -> list[tuple[Device, Gid]]:
    """One (device, GID) a port.

    Args:
      found: this host's devices.
      address: this host's entry of mesh.peers, an IPv4 address.
      names: mesh.devices, a name a port; () finds the device of `address`, and for a second rail
        the other PCIe function of the same cage.
      ports: how many are wanted.

    Raises:
      DeviceError.
    """
    if not found:
        raise DeviceError("mesh.transport is fabric; this host has no RDMA device")
    by_name = {device.name: device for device in found}
    if not names:
        first = next((d for d in found if d.gid(address)), None)
        if first is None:
            raise DeviceError(
                f"no RDMA device has a RoCE v2 GID of {address} (mesh.peers); there is {_all(found)}"
            )
        chosen = [first]
        if ports == 2:
            second = twin(first, found)
            if second is None:
                raise DeviceError(
                    f"mesh.rails is 2; the other PCIe function of {first.name} was not found; name "
                    f"both in mesh.devices; there is {_all(found)}"
                )
            chosen.append(second)
        if ports > 2:
            raise DeviceError(
                f"mesh.devices is empty; a ring needs {ports} names: first those towards the next "
                f"rank, then those towards the one before; there is {_all(found)}"
            )
    else:
        if len(names) != ports:
            raise DeviceError(f"mesh.devices names {len(names)} devices; {ports} are needed")
        for name in names:
            if name not in by_name:
                raise DeviceError(f"mesh.devices: {name!r} is not here; there is {_all(found)}")
        chosen = [by_name[name] for name in names]
    picked = []
    for device in chosen:
        if not device.active:
            raise DeviceError(f"{device.name}: the port is not active (cable, or link down)")
        gid = device.gid(address) or device.gid()
        if gid is None:
            raise DeviceError(
                f"{device.name} has no IPv4 RoCE v2 GID: give its interface an address"
            )
        picked.append((device, gid))
    return picked


def twin(device: Device, found: list[Device]) -> Device | None:
    """The other PCIe function of the same cage: the same bus address in another PCI domain."""
    _, _, address = device.place.partition(":")
    return next(
        (d for d in found if d is not device and address and d.place.partition(":")[2] == address),
        None,
    )


def _all(found: list[Device]) -> str:
    return ", ".join(
        f"{d.name} ({', '.join(g.address for g in d.gids if g.address) or 'no IPv4 GID'})"
        for d in found
    )
