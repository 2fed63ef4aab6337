"""What grammar masks cost a decode step: the same engine, the same rows, with and without them.

    python bench/masks.py --path package:PACKAGE/FILE.gguf --rows 8

Blocks of ticks with constrained and with free requests take turns, so that what else the machine
does meets both. Prints one JSON receipt.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import receipts

from sparkjax.config import locate
from sparkjax.engine.engine import Engine
from sparkjax.engine.limits import make_limits
from sparkjax.engine.records import Grammar, Sampling, Submit
from sparkjax.model import Model
from sparkjax.structured.sources import Wanted, source

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "email": {"type": "string", "format": "email"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4},
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string"},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["street", "zip"],
        },
    },
    "required": ["name", "email", "age", "tags", "address"],
}
SCHEMAS = {
    False: ({"type": "array", "minItems": 1000, "items": PERSON}, 1000),
    True: ({"type": "array", "minItems": 2, "maxItems": 9, "items": PERSON}, 120),
}
"""Schema and max_tokens: one that goes on longer than any round, and one that is led to its end from
its first token on."""


def block(
    engine: Engine, rows: int, ticks: int, grammar: Grammar | None, most: int, seed: int
) -> list[tuple[float, float]]:
    """Seconds of the clock and of processors of each tick of `rows` decoding requests."""
    ends = engine.runner.grammars().alphabet.ends
    prompt = tuple(engine.model.encode("A list of people as JSON:\n"))
    submits = tuple(
        # Free requests may not end either: the ends count only under a grammar.
        Submit(
            engine.new_id(),
            prompt,
            most,
            Sampling(temperature=1.0, seed=seed + i),
            ends if grammar else (),
            grammar=grammar,
        )
        for i in range(rows)
    )
    engine.tick(submits)
    while any(engine.plan.tiles) or len(engine.plan.rows) < rows:
        engine.tick()
    for _ in range(3):
        engine.tick()
    found = []
    for _ in range(ticks):
        begin, used = time.perf_counter(), time.process_time()
        engine.tick()
        found.append((time.perf_counter() - begin, time.process_time() - used))
        assert len(engine.plan.rows) == rows
    engine.tick(cancels=tuple(s.id for s in submits))
    while not engine.idle:
        engine.tick()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--path", required=True)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--ticks", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--near", action="store_true", help="answers whose tokens run out")
    args = parser.parse_args()

    model = Model.load(locate(args.path))
    limits = make_limits(model, slots=args.rows, context=1280, kv_tokens=1280 * args.rows)
    engine = Engine(model, limits)
    engine.runner.warm()
    schema, most = SCHEMAS[args.near]
    grammar = Grammar(source(Wanted("json_schema", schema)).text)
    free: list[tuple[float, float]] = []
    masked: list[tuple[float, float]] = []
    for i in range(args.rounds + 1):
        a = block(engine, args.rows, args.ticks, None, most, i * 100)
        b = block(engine, args.rows, args.ticks, grammar, most, i * 100)
        if i:  # the first round warms up
            free += a
            masked += b

    def figures(at: int) -> dict[str, Any]:
        sides = [sorted(tick[at] * 1e3 for tick in side) for side in (free, masked)]
        medians = [statistics.median(side) for side in sides]
        return {
            "free_ms": round(medians[0], 2),
            "masked_ms": round(medians[1], 2),
            "masked_over_free": round(medians[1] / medians[0], 3),
            "quartiles_ms": [[round(q, 2) for q in statistics.quantiles(s)] for s in sides],
        }

    receipts.show(
        {
            "what": f"decode ticks of {Path(args.path).name}, {args.rows} rows, temperature 1",
            "device": jax.devices()[0].device_kind,
            "schema": "an array of people: strings, a format, a pattern, bounds, enums",
            "clock": figures(0),
            "processors": figures(1),
        }
    )


if __name__ == "__main__":
    main()
