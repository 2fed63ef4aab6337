"""Byte ranges of a file: the first byte and the one behind the last."""

from __future__ import annotations

from collections.abc import Iterable

Range = tuple[int, int]
GAP = 1 << 20
"""Bytes between two wanted ranges that are taken along: asking anew costs more."""


def merged(ranges: Iterable[Range], gap: int | None = None) -> list[Range]:
    """The same bytes as few ranges in order; gaps of up to `gap` (default: GAP) bytes are filled."""
    gap = GAP if gap is None else gap
    out: list[Range] = []
    for begin, end in sorted(r for r in ranges if r[0] < r[1]):
        if out and begin <= out[-1][1] + gap:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((begin, end))
    return out


def without(ranges: Iterable[Range], have: Iterable[Range]) -> list[Range]:
    """The parts of ranges that others do not cover."""
    out: list[Range] = []
    covered = merged(have, 0)
    for begin, end in ranges:
        for first, last in covered:
            if last <= begin or first >= end:
                continue
            if first > begin:
                out.append((begin, first))
            begin = max(begin, last)
        if begin < end:
            out.append((begin, end))
    return out
