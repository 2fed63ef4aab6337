"""Whether all ranks are about to do the same thing: named facts, compared field by field."""

from __future__ import annotations

import msgspec

from .world import WorldError

Facts = dict[str, str]
"""Name -> value, such as "config engine.slots" -> "8"."""

ABSENT = "(none)"


def differences(facts: list[Facts], who_is: str = "rank") -> list[str]:
    """One line for every field that is not the same on all ranks, with every rank's value."""
    lines = []
    for name in sorted({name for rank in facts for name in rank}):
        values = [rank.get(name, ABSENT) for rank in facts]
        if len(set(values)) > 1:
            ranks: dict[str, list[str]] = {}
            for rank, value in enumerate(values):
                ranks.setdefault(value, []).append(str(rank))
            what = "; ".join(f"{who_is} {', '.join(who)}: {value}" for value, who in ranks.items())
            lines.append(f"{name} differs: {what}")
    return lines


def encode(facts: Facts) -> bytes:
    return msgspec.msgpack.encode(facts)


def agree(brought: list[bytes]) -> bytes:
    """A decision for `World.exchange`: all ranks bring equal facts, or the world does not start."""
    facts = [msgspec.msgpack.decode(data, type=Facts) for data in brought]
    lines = differences(facts)
    if lines:
        raise WorldError("the ranks do not agree:", *lines)
    return b""
