"""The pages of the API name tests, metrics and codes that exist."""

from __future__ import annotations

import re
from pathlib import Path

from sparkjax.api import metrics

ROOT = Path(__file__).resolve().parents[2]


def test_named_tests_exist():
    sources = "".join(p.read_text() for p in (ROOT / "tests").rglob("test_*.py"))
    existing = set(re.findall(r"^def (test_\w+)", sources, re.M))
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "api.md").read_text()))
    assert len(named) > 40 and named <= existing


def test_every_row_names_a_test():
    """Of each table with a column of tests; the text around the others names theirs."""
    head: list[str] | None = None
    rows = 0
    for line in (ROOT / "docs" / "api.md").read_text().splitlines():
        if not line.startswith("|"):
            head = None
            continue
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if head is None:
            head = cells
        elif set(line) - set("|- ") and head[-1] == "test":
            assert "`test_" in cells[-1], line
            rows += 1
    assert rows > 80


def test_every_error_code_is_documented():
    sources = "".join(p.read_text() for p in (ROOT / "sparkjax" / "api").glob("*.py"))
    codes = set(re.findall(r'code="(\w+)"', sources))
    page = (ROOT / "docs" / "api.md").read_text()
    operation = {"internal_error", "not_local", "profiler_busy"}
    assert {code for code in codes - operation if f"`{code}`" not in page} == set()


def test_every_metric_is_documented():
    page = (ROOT / "docs" / "operations.md").read_text()
    names = {*metrics.COUNTERS, *metrics.HISTOGRAMS, *metrics.GAUGES}
    names |= {f"sparkjax:{name}" for name in metrics.OWN_GAUGES}
    assert {name for name in names if f"`{name}`" not in page} == set()


def test_every_case_has_a_test():
    sources = "".join(p.read_text() for p in (ROOT / "tests").rglob("test_*.py"))
    cases = {int(n) for n in re.findall(r"def test_T(\d+)_", sources)}
    assert {*range(1, 34), *range(46, 52), 55, 64} <= cases
