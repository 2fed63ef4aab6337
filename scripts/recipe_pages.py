"""Writes docs/recipes: a page for every recipe of serving/ that a manifest describes.

    python scripts/recipe_pages.py [--compile] [RECIPE ...]

Every figure is `sparkjax plan`'s, so it is projected; with --compile the programs are compiled for
GB10 and their launches and collectives count, without it only the bytes that are read do.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from sparkjax import config as configuration
from sparkjax.engine.memory import GIB
from sparkjax.plan import recipe
from sparkjax.plan.devices import device
from sparkjax.plan.report import DECODE_CONTEXT, Report, plan

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs" / "recipes"
LISTED = GIB // 5
"""Items below this many bytes share one line of a page."""


def page(path: Path, report: Report, repository: str | None) -> str:
    """The Markdown of one recipe."""
    boxes = "one box" if report.ranks == 1 else f"{report.ranks} boxes"
    counted = "launches and collectives included" if report.programs else "by bytes and arithmetic alone"
    relative = path.relative_to(ROOT)
    lines = [
        f"# {report.model}: {path.stem}",
        "",
        f"{boxes.capitalize()}, {report.limits.slots} slots of {report.limits.context:,} tokens, a pool "
        f"of {report.limits.pages * report.limits.page_size:,}. All figures are projected ({counted}), "
        "not measured on GB10 boxes.",
        "",
    ]
    if repository:
        lines += [f"    sparkjax pull {repository}"]
    if report.ranks == 1:
        lines += [f"    sparkjax serve -c {relative}", ""]
    else:
        lines += [f"    sparkjax up -c {relative}     # on each host; see ../networking.md", ""]
    lines += ["| memory of a rank | GiB |", "| --- | --- |"]
    small = 0
    for item in sorted(report.memory.items, key=lambda item: -item.nbytes):
        if item.nbytes < LISTED:
            small += item.nbytes
        else:
            lines.append(f"| {item.kind}: {item.name} | {item.nbytes / GIB:.1f} |")
    lines += [
        f"| everything smaller | {small / GIB:.1f} |",
        f"| total | {report.memory.total / GIB:.1f} |",
        f"| left of {report.memory.available / GIB:.0f} | {report.memory.free / GIB:.1f} |",
        "",
        f"Largest pool that fits: `engine.kv_tokens: {report.pool_tokens}`. A token of one stream "
        f"reads {report.token_bytes / 1e9:.2f} GB on each rank.",
        "",
        f"| projected, streams of {DECODE_CONTEXT:,} tokens | ms a step | tokens a second | limit |",
        "| --- | --- | --- | --- |",
    ]
    for streams, speed in report.decode.items():
        lines.append(
            f"| {streams} | {speed.seconds * 1e3:.1f} | {speed.tokens_per_second:.1f} | {speed.limit} |"
        )
    lines += ["", "| projected prompt, tokens | seconds | limit |", "| --- | --- | --- |"]
    for tokens, speed in report.prefill.items():
        lines.append(f"| {tokens:,} | {speed.seconds:.2f} | {speed.limit} |")
    command = f"sparkjax plan -c {relative}{'' if report.programs else ' --no-compile'}"
    return "\n".join([*lines, "", "Made by", "", f"    {command}", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("recipes", nargs="*", type=Path)
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    PAGES.mkdir(exist_ok=True)
    for path in [p.resolve() for p in args.recipes] or sorted((ROOT / "serving").glob("*.yaml")):
        loaded = configuration.load(path)
        try:
            manifest = recipe.manifest_of(loaded)
        except recipe.PlanError as error:
            print(f"{path.name}: no page: {error}")
            continue
        ranks = max(loaded.mesh.tensor_parallel, 1)
        limits = recipe.limits_of(loaded.engine, manifest, ranks)
        report = plan(manifest, limits, device("gb10"), ranks, compile=args.compile)
        (PAGES / f"{path.stem}.md").write_text(page(path, report, manifest.repository))
        print(f"{path.name}: {report.memory.free / GIB:.1f} GiB left")


if __name__ == "__main__":
    main()
