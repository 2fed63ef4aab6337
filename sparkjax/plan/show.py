"""A plan as tables for a terminal."""

from __future__ import annotations

import collections

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..engine.memory import GIB
from .fit import shortfall
from .report import DECODE_CONTEXT, Report, Speed

SMALL = GIB // 50
"""Items below this many bytes share one line."""


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, show_edge=False)
    for at, column in enumerate(columns):
        table.add_column(column, justify="right" if at else "left", no_wrap=True)
    return table


def memory_table(report: Report) -> Table:
    """Every item with its GiB, largest first, and what is left."""
    table = _table("memory of a rank", "GiB")
    small = 0
    for item in sorted(report.memory.items, key=lambda item: -item.nbytes):
        if item.nbytes < SMALL:
            small += item.nbytes
        else:
            table.add_row(f"{item.kind}: {item.name}", f"{item.nbytes / GIB:.2f}")
    table.add_row("everything smaller", f"{small / GIB:.2f}")
    table.add_row("total", f"{report.memory.total / GIB:.2f}")
    table.add_row("left" if report.fits else "missing", f"{abs(report.memory.free) / GIB:.2f}")
    return table


def program_table(report: Report) -> Table:
    """Launches, collectives and the compiler's own memory analysis of every program."""
    table = _table("program", "launches", "collectives", "arguments GiB", "temporaries GiB")
    for name, program in report.programs.items():
        sizes: collections.Counter[str] = collections.Counter()
        for (kind, size), n in program.counts.collectives.items():
            sizes[f"{n} x {kind} of {size / 1024:.0f} KiB"] += n
        table.add_row(
            name,
            str(program.counts.total),
            "\n".join(sizes) or "none",
            f"{program.arguments / GIB:.2f}",
            f"{program.temporaries / GIB:.2f}",
        )
    return table


def speed_table(report: Report) -> Table:
    """Projected speeds, the time by cause, and what limits each."""
    table = _table("projected", "time", "tok/s", "read", "compute", "launch", "collect", "limit")
    for streams, speed in report.decode.items():
        _row(table, f"decode, {streams} stream{'s' * (streams > 1)}", speed, 1e3, "ms")
    for tokens, speed in report.prefill.items():
        _row(table, f"prefill, {tokens} tokens", speed, 1.0, "s")
    return table


def _row(table: Table, name: str, speed: Speed, scale: float, unit: str) -> None:
    parts = speed.parts
    values = (parts.memory, parts.arithmetic, parts.launches, parts.collectives)
    table.add_row(
        name,
        f"{speed.seconds * scale:.1f} {unit}",
        f"{speed.tokens_per_second:.1f}",
        *(f"{value * scale:.1f}" for value in values),
        speed.limit,
    )


def render(report: Report) -> RenderableType:
    """The whole report."""
    head = Text(
        f"{report.model} ({report.manifest}) on {report.ranks} x {report.device.kind}, "
        f"{report.limits.slots} slots of {report.limits.context} tokens"
    )
    head.stylize("bold")
    lines = [
        f"decode figures: streams of {DECODE_CONTEXT} tokens, greedy",
        f"bytes read for a token, each rank: {report.token_bytes / 1e9:.2f} GB",
        f"largest pool that fits: engine.kv_tokens {report.pool_tokens} "
        f"({report.concurrency} sequences of {report.limits.context} tokens)",
    ]
    if report.note:
        lines.append(report.note)
    if not report.fits:
        lines.append(shortfall(report))
    parts: list[RenderableType] = [head, "", memory_table(report), ""]
    if report.programs:
        parts += [program_table(report), ""]
    return Group(*parts, speed_table(report), "", *lines)
