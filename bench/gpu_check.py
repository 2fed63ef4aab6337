"""Every golden of tests/golden on this machine's accelerator: `verify`, and rows in company.

    python bench/gpu_check.py [FAMILY ...]

`rows_equal` says whether a prompt's greedy tokens and their log-probabilities are the same to the
bit alone, among 8 and among 64 rows of one engine. Prints what is done and a line a comparison that
is off on standard error, and one JSON receipt; exits 1 when anything is.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

import receipts

from sparkjax.engine.engine import Engine
from sparkjax.engine.limits import make_limits
from sparkjax.engine.plan import Event
from sparkjax.engine.records import Sampling, Submit
from sparkjax.model import Model
from sparkjax.verify import verify
from sparkjax.weights.safetensors import SafetensorsFile

GOLDEN = Path(__file__).parent.parent / "tests" / "golden"
PROMPTS, TOKENS, SLOTS = 2, 24, 64


def rows_equal(folder: Path) -> bool:
    """Whether the golden's prompts get the same answers, to the bit, in any company."""
    model = Model.load(folder, dtype="bfloat16")
    limits = make_limits(
        model, slots=SLOTS, context=512, tiles=(64,), busy_tiles=SLOTS, idle_tiles=SLOTS
    )
    engine = Engine(model, limits)
    golden = SafetensorsFile(folder / "golden.safetensors")
    prompts = [tuple(golden.read(f"prompt_{i}.input_ids").tolist()) for i in range(PROMPTS)]
    alone = [answers(engine, [prompt], 0)[0] for prompt in prompts]
    return all(answers(engine, prompts, rows - PROMPTS) == alone for rows in (8, SLOTS))


def answers(engine: Engine, prompts: list[tuple[int, ...]], others: int) -> list[list[Any]]:
    """Tokens and log-probabilities of each prompt, among so many others of random length."""
    rng = np.random.default_rng(others)
    vocab = engine.model.config.vocab
    # The others are there first and answer for longer, so that all rows run together.
    company = [
        Submit(engine.new_id(), tuple(rng.integers(0, vocab, length).tolist()), 2 * TOKENS)
        for length in rng.integers(1, 64, others)
    ]
    asked = [Submit(engine.new_id(), p, TOKENS, Sampling(logprobs=1)) for p in prompts]
    found: dict[int, list[Any]] = {s.id: [] for s in asked}
    events: list[Event] = engine.tick(tuple(company))
    submits = tuple(asked)
    while submits or not engine.idle:
        events = engine.tick(submits)
        submits = ()
        for event in events:
            if event.id in found:
                found[event.id] += [(entry.token, entry.logprob) for entry in event.logprobs]
    return list(found.values())


def main() -> None:
    rows, ok = [], True
    names = sys.argv[1:] or sorted(path.name for path in GOLDEN.iterdir())
    for folder in (GOLDEN / name for name in names):
        for dtype in ("float32", "bfloat16"):
            report = verify(folder, dtype=dtype)
            logits = [line for line in report.lines if line.what.endswith("logits")]
            row = {
                "golden": folder.name,
                "dtype": dtype,
                "ok": report.ok,
                "lines": len(report.lines),
                "relative": max(line.relative or 0 for line in logits),
                "absolute": max(line.absolute or 0 for line in logits),
                "notes": [line.note for line in report.lines if line.note],
            }
            for line in report.lines:
                if line.ok is False:
                    print(folder.name, dtype, line, file=sys.stderr)
            print(row, file=sys.stderr, flush=True)
            ok &= report.ok
            rows.append(row)
        row["rows_equal"] = equal = rows_equal(folder)
        print(f"{folder.name} rows_equal: {equal}", file=sys.stderr, flush=True)
        ok &= equal
        jax.clear_caches()
    device = jax.devices()[0].device_kind
    receipts.show({"what": "goldens", "device": device, "ok": ok, "goldens": rows})
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
