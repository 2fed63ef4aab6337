"""What is wrong with this host's links, as far as it shows before a world starts."""

from __future__ import annotations

from .. import TransportError
from . import devices, measure, native, topology, verbs
from .transport import SLOT_BYTES, WINDOW, ipv4

Facts = dict[str, str]


def look(
    host: str, ranks: int, shape: str, rails: int, names: tuple[str, ...]
) -> tuple[Facts, list[str]]:
    """(what has to be equal on all hosts, what is wrong here).

    Args:
      host: this host's address in mesh.peers.
      shape, rails, names: mesh.shape, mesh.rails, mesh.devices.
    """
    facts = {"fabric rails": str(rails), "fabric shape": shape}
    problems = []
    if not native.verbs_flags():
        problems.append(f"fabric: {native.VERBS} is not here (apt-get install libibverbs-dev)")
    if said := memory(picture_bytes(ranks), verbs.locked_limit()):
        problems.append(said)
    try:
        ports = topology.ports(shape, rails)
        chosen = devices.choose(verbs.devices(), ipv4(host), names, ports)
    except (TransportError, ValueError) as error:
        return facts, [*problems, str(error)]
    for port, (device, _) in enumerate(chosen):
        facts[f"fabric rail {port} RDMA MTU"] = str(device.mtu)
        if device.mtu < measure.GOOD_MTU:
            problems.append(measure.small_mtu(device.name, device.mtu))
    return facts, problems


def picture_bytes(ranks: int) -> int:
    """Registered bytes of a rank: every rank's slots (image.h), to a page or two."""
    return ranks * 2 * WINDOW * (SLOT_BYTES + 64) + ranks * 2 * WINDOW * 256 + 16384


def memory(needed: int, limit: int | None) -> str:
    """Whether so much memory may be locked, "" if it may."""
    if limit is None or limit >= needed:
        return ""
    return (
        f"fabric: {limit >> 10} KiB of memory may be locked and {needed >> 10} KiB are needed: set "
        "memlock to unlimited in /etc/security/limits.d (LimitMEMLOCK=infinity under systemd)"
    )
