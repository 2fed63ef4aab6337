"""`sparkjax plan`: the recipe's plan, or proposals for a published checkpoint."""

from __future__ import annotations

import json
from typing import Any

import typer
from rich.console import Console

from . import show


def run(
    config: Any, named: str | None, boxes: int | None, device: str, compile: bool, as_json: bool
) -> None:
    """Plans `config` (or the manifest `named` over 1 to 6 boxes) and prints it.

    Raises:
      typer.Exit: with code 1 when the recipe does not fit.
    """
    from ..plan import recipe
    from ..plan.devices import device as constants
    from ..plan.fit import nearest, shortfall
    from ..plan.report import as_json as values
    from ..plan.report import plan
    from ..plan.show import memory_table, render

    try:
        kind = constants(device)
        manifest = (
            recipe.manifest_named(named) if named is not None else recipe.manifest_of(config)
        )

        def again(ranks: int, kv_tokens: int | None = None, compile: bool = False) -> Any:
            limits = recipe.limits_of(config.engine, manifest, ranks, kv_tokens)
            kernels = tuple(config.kernels.items())
            return plan(manifest, limits, kind, ranks, compile, kernels)

        if named is not None and boxes is None:
            propose(manifest, again, as_json)
            return
        ranks = boxes or max(config.mesh.tensor_parallel, len(config.mesh.peers), 1)
        report = again(ranks)
        if report.fits:
            report = again(ranks, compile=compile)
        suggestions = [] if report.fits else nearest(report, again)
    except ValueError as error:
        show.fail(str(error))
    if as_json:
        found = values(report)
        found["suggestions"] = [
            {"settings": s.settings, "report": values(s.report)} for s in suggestions
        ]
        typer.echo(json.dumps(found))
    else:
        console = Console()
        if report.fits:
            console.print(render(report))
        else:
            console.print(memory_table(report), "", shortfall(report), sep="\n")
            for s in suggestions:
                left = s.report.memory.free / (1 << 30)
                console.print(f"fits with {s.settings} ({left:.1f} GiB left)")
    if not report.fits:
        raise typer.Exit(1)


def propose(manifest: Any, again: Any, as_json: bool) -> None:
    """One line for each number of boxes: whether the checkpoint fits, its pool and its speed."""
    from rich.table import Table

    from ..plan.fit import BOXES

    table = Table(box=None, pad_edge=False)
    for column in ("boxes", "GiB a rank", "largest engine.kv_tokens", "tokens/s, 1 stream", "8 streams"):
        table.add_column(column, justify="right")
    found = []
    for ranks in BOXES:
        report = again(ranks)
        needed = (report.memory.total - report.memory.of("caches")) / (1 << 30)
        speeds = {n: s.tokens_per_second for n, s in report.decode.items()}
        fits = report.pool_tokens >= report.limits.context
        found.append(
            {"boxes": ranks, "fits": fits, "gib_without_pool": needed, "kv_tokens": report.pool_tokens}
            | {"tokens_per_second": speeds, "projected": True}
        )
        table.add_row(
            str(ranks),
            f"{needed:.1f}",
            str(report.pool_tokens) if fits else "does not fit",
            f"{speeds[1]:.1f}" if fits else "",
            f"{speeds.get(8, speeds[max(speeds)]):.1f}" if fits else "",
        )
    if as_json:
        typer.echo(json.dumps({"manifest": manifest.name, "proposals": found}))
        return
    console = Console()
    console.print(f"{manifest.product} ({manifest.name}); GiB without the pool; speeds are projected")
    console.print(table)


def bench_device(as_json: bool) -> None:
    """Measures this process's device, keeps the constants where `sparkjax plan` finds them, and
    prints them."""
    import msgspec

    from ..plan import devices, measure

    measured = measure.measure(devices.device("gb10"))
    path = devices.MEASURED.expanduser() / devices.file_name(measured.kind)
    measure.write(measured, path)
    if as_json:
        typer.echo(json.dumps(msgspec.to_builtins(measured) | {"file": str(path)}))
        return
    for field, value in msgspec.to_builtins(measured).items():
        typer.echo(f"{field}: {value}")
    typer.echo(f"written to {path}")
