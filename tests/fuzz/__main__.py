"""The command: tries the surfaces one after the other and prints one JSON receipt."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import logging
import random
import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from . import bodies, grammars, texts, wire

SHARES = {
    texts.parsers: 0.55,
    texts.answers: 0.1,
    texts.values: 0.1,
    bodies.bodies: 0.1,
    grammars.grammars: 0.05,
    wire.connections: 0.05,
    wire.described: 0.05,
}
"""How many of all inputs each surface gets."""
MOST_FINDINGS = 20


def main() -> int:
    """See the package."""
    options = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    options.add_argument("--count", type=int, default=1000, help="inputs in all")
    options.add_argument("--seconds", type=float, default=float("inf"), help="stop after these")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--only", action="append", help="names of surfaces")
    options.add_argument("--number", type=int, help="try this one input of --only")
    asked = options.parse_args()
    by_name = {surface.__name__: surface for surface in SHARES}
    unknown = set(asked.only or ()) - set(by_name)
    if unknown:
        options.error(f"--only is {', '.join(unknown)}; allowed: {', '.join(by_name)}")
    chosen = {n: s for n, s in by_name.items() if not asked.only or n in asked.only}
    whole = sum(SHARES[surface] for surface in chosen.values())
    counts: dict[str, int] = {}
    seconds: dict[str, float] = {}
    findings: list[dict[str, Any]] = []
    for name, surface in chosen.items():
        wanted = round(asked.count * SHARES[surface] / whole)
        numbers = range(wanted) if asked.number is None else [asked.number]
        begun = time.monotonic()
        with errors_logged() as logged, surface() as check:
            until = begun + asked.seconds * SHARES[surface] / whole
            counts[name] = run(name, check, asked.seed, numbers, findings, until)
        findings += [{"surface": name, "logged": each} for each in logged]
        seconds[name] = round(time.monotonic() - begun, 1)
        print(f"{name}: {counts[name]} inputs, {seconds[name]} s", file=sys.stderr, flush=True)
    receipt = {
        "date": datetime.date.today().isoformat(), "seed": asked.seed,
        "inputs": sum(counts.values()), "surfaces": counts, "seconds": seconds, "findings": findings,
    }  # fmt: skip
    print(json.dumps(receipt, ensure_ascii=False, indent=1))
    return 1 if findings else 0


def run(
    name: str, check: Any, seed: int, numbers: Any, findings: list[dict[str, Any]], until: float
) -> int:
    """Tries inputs until a moment of `time.monotonic`; how many that were."""
    if (whole := getattr(check, "whole", None)) is not None:  # it counts for itself
        done, problems = whole(len(numbers), seed)
        findings += [{"surface": name, "error": each} for each in problems]
        return int(done)

    def one(number: int) -> dict[str, Any] | None:
        try:
            check(random.Random(f"{seed}.{name}.{number}"))
        except Exception:  # whatever it is, it is a finding
            words = traceback.format_exc().splitlines()
            return {
                "surface": name,
                "number": number,
                "error": words[-1][:500],
                "at": words[-3][:200],
            }
        return None

    done = 0
    with ThreadPoolExecutor(getattr(check, "threads", 1)) as pool:
        for found in pool.map(one, numbers):
            done += 1
            if found is not None:
                findings.append(found)
                print(found, file=sys.stderr, flush=True)
            if len(findings) >= MOST_FINDINGS or time.monotonic() > until:
                pool.shutdown(cancel_futures=True)
                break
    return done


@contextlib.contextmanager
def errors_logged() -> Iterator[list[str]]:
    """What the code under test logs as an error: a crash that an answer hides."""
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage()[:500])

    handler = Keep(logging.ERROR)
    logging.getLogger().addHandler(handler)
    try:
        yield found
    finally:
        logging.getLogger().removeHandler(handler)


if __name__ == "__main__":
    sys.exit(main())
