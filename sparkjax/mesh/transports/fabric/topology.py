"""Which rank is reached over which link, and what is passed on for others.

A *link* joins two ranks on one rail: a queue pair at each end. A *path* to a rank begins with a link;
a payload is striped over all paths. In the `direct` shape every two ranks share links. In a `ring`
rank r shares links with r - 1 and r + 1 alone: in a ring of four the rank opposite is reached over
both neighbours, which relay what they get.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

SHAPES = ("direct", "ring")
MOST_RANKS = 16
MOST_PATHS = 4


@dataclasses.dataclass(frozen=True)
class Link:
    """One end. `port` counts the devices of this host that links use: `rails` of them towards
    everybody (direct) or towards the next rank, and in a ring as many towards the one before."""

    peer: int
    rail: int
    port: int


@dataclasses.dataclass(frozen=True)
class Relay:
    """What `origin` sent for `target` goes on over `link`, as `target`'s path number `path`."""

    origin: int
    target: int
    path: int
    link: int


@dataclasses.dataclass(frozen=True)
class Layout:
    """One rank's view. `paths[who]` are the first links of each path to `who`."""

    links: tuple[Link, ...]
    paths: tuple[tuple[int, ...], ...]
    relays: tuple[Relay, ...]


def conflicts(shape: str, ranks: int, rails: int) -> Iterator[tuple[str, str]]:
    """(setting, what is wrong with it) where there is no such layout."""
    if shape not in SHAPES:
        yield "mesh.shape", f"is {shape!r}; allowed: {', '.join(SHAPES)}"
        return
    if shape == "ring" and ranks not in (3, 4):
        yield (
            "mesh.shape",
            f"is ring with {ranks} ranks; allowed: 3 or 4 (through a switch: direct)",
        )
    if not 2 <= ranks <= MOST_RANKS:
        yield "mesh.transport", f"is fabric with {ranks} ranks; allowed: 2 to {MOST_RANKS}"
    if rails not in (1, 2):
        yield "mesh.rails", f"is {rails}; allowed: 1 or 2"


def device_conflicts(shape: str, rails: int, devices: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """(setting, what is wrong with it) where devices do not fit the layout."""
    wanted = ports(shape, rails)
    if devices and len(devices) != wanted:
        yield (
            "mesh.devices",
            f"names {len(devices)} devices; mesh.shape and mesh.rails want {wanted}",
        )
    if not devices and shape == "ring":
        yield (
            "mesh.devices",
            f"is empty; a ring needs {wanted} names: first those towards the next rank, then those "
            "towards the one before",
        )
    if len(set(devices)) != len(devices):
        yield "mesh.devices", f"is {list(devices)}; allowed: different devices"


def ports(shape: str, rails: int) -> int:
    """How many devices of a host carry links."""
    return 2 * rails if shape == "ring" else rails


def layout(shape: str, rank: int, ranks: int, rails: int) -> Layout:
    """Links, paths and relays of one rank. Raises ValueError naming the setting."""
    for setting, said in conflicts(shape, ranks, rails):
        raise ValueError(f"{setting} {said}")
    if shape == "direct":
        peers = [who for who in range(ranks) if who != rank]
        links = tuple(Link(who, rail, rail) for who in peers for rail in range(rails))
    else:
        after, before = (rank + 1) % ranks, (rank - 1) % ranks
        links = tuple(
            Link(who, rail, side * rails + rail)
            for side, who in enumerate((after, before))
            for rail in range(rails)
        )
    near = {
        who: tuple(i for i, link in enumerate(links) if link.peer == who) for who in range(ranks)
    }
    # Whoever shares no link with us is opposite: all our links lead there, those of `after` first.
    far = tuple(range(len(links)))
    paths = tuple(() if who == rank else near[who] or far for who in range(ranks))
    relays: tuple[Relay, ...] = ()
    if shape == "ring" and ranks == 4:
        relays = tuple(
            Relay(origin, target, side * rails + links[i].rail, i)
            for side, (origin, target) in enumerate(((before, after), (after, before)))
            for i in near[target]
        )
    return Layout(links, paths, relays)
