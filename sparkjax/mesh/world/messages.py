"""What ranks say to one another."""

from __future__ import annotations

import msgspec


class _Base(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Hello(_Base, frozen=True, tag="hello"):
    """A rank's first words to rank 0. `host` and `pid` are for people."""

    rank: int
    ranks: int
    host: str
    pid: int


class Welcome(_Base, frozen=True, tag="welcome"):
    """Rank 0 takes this rank."""


class Refused(_Base, frozen=True, tag="refused"):
    """Rank 0 does not take this rank."""

    reason: str


class Arrived(_Base, frozen=True, tag="arrived"):
    """A rank has come to `stage` and brings `data`."""

    stage: str
    data: bytes


class Decided(_Base, frozen=True, tag="decided"):
    """All ranks came to `stage`, and rank 0 made `data` of what they brought; or `problems`."""

    stage: str
    data: bytes
    problems: tuple[str, ...] = ()


class Record(_Base, frozen=True, tag="record"):
    """A frame of the journal, to be applied in order."""

    frame: bytes


class Beat(_Base, frozen=True, tag="beat"):
    """Still here: where this rank is, and how many records it has applied."""

    stage: str
    applied: int


class Failed(_Base, frozen=True, tag="failed"):
    """The world ends."""

    reason: str


class Leave(_Base, frozen=True, tag="leave"):
    """A rank was asked to stop and asks rank 0 to end the world in order."""

    reason: str


class Bye(_Base, frozen=True, tag="bye"):
    """The world ends in order."""


class Ask(_Base, frozen=True, tag="ask"):
    """To a host's agent: a verb, and for "logs" how many lines."""

    verb: str
    lines: int = 0


class Answer(_Base, frozen=True, tag="answer"):
    """An agent's answer: JSON, or an error."""

    data: bytes
    error: str = ""


Message = Ask | Answer | Hello | Welcome | Refused | Arrived | Decided | Record | Beat | Failed | Leave | Bye
