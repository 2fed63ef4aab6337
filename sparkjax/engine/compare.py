"""Comparing the decision logs of two ranks: where did they first do something else?"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator

from .journal import read_journal
from .records import Applied, Entry, Settings, Tick


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two logs of one world.

    Attributes:
      ticks: ticks that both applied.
      longer: ticks that only the longer log has: the other rank was gone.
      differences: a line for each thing that is not the same, the first one first.
    """

    ticks: int
    longer: int
    differences: tuple[str, ...]

    @property
    def same(self) -> bool:
        return not self.differences


def compare_logs(first: str | os.PathLike[str], second: str | os.PathLike[str]) -> Comparison:
    """Compares the last run in each of two crash logs (`engine.journal`, a file a rank).

    Raises:
      JournalError, OSError: a log is damaged before its end, or cannot be read.
    """
    one, two = (_last_run(read_journal(path).records) for path in (first, second))
    lines = list(_settings(one[0], two[0]))
    ticks = sorted(one[1].keys() & two[1].keys())
    for number in ticks:
        if one[1][number] != two[1][number]:
            lines.append(f"tick {number}: the records differ")
    applied = sorted(one[2].keys() & two[2].keys())
    for number in applied:
        a, b = one[2][number], two[2][number]
        if a == b:
            continue
        pairs = zip(a.operations, b.operations, strict=False)
        at = next((i for i, (x, y) in enumerate(pairs) if x != y), None)
        if at is not None:
            lines.append(f"tick {number}: {a.operations[at]!r} here, {b.operations[at]!r} there")
        else:
            lines.append(
                f"tick {number}: {len(a.operations)} operations, digest {a.digest:016x} here; "
                f"{len(b.operations)}, {b.digest:016x} there"
            )
        break  # whatever follows follows from this one
    longer = len(one[2].keys() ^ two[2].keys())
    return Comparison(len(applied), longer, tuple(lines))


def _last_run(
    records: tuple[Entry, ...],
) -> tuple[Settings | None, dict[int, Tick], dict[int, Applied]]:
    settings: Settings | None = None
    ticks: dict[int, Tick] = {}
    applied: dict[int, Applied] = {}
    for record in records:
        match record:
            case Settings():
                settings, ticks, applied = record, {}, {}
            case Tick():
                ticks[record.number] = record
            case Applied():
                applied[record.number] = record
    return settings, ticks, applied


def _settings(one: Settings | None, two: Settings | None) -> Iterator[str]:
    if one is None or two is None:
        yield "a log has no settings record"
    elif one.version != two.version:
        yield f"version {one.version} here, {two.version} there"
    elif one.limits != two.limits:
        yield f"limits {one.limits} here, {two.limits} there"
    else:
        for name in sorted(one.digests.keys() | two.digests.keys()):
            a, b = one.digests.get(name), two.digests.get(name)
            if a != b:
                yield f"digest of {name}: {a} here, {b} there"
