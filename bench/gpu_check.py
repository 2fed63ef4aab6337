"""Every golden of tests/golden through `verify` on this machine's accelerator.

    python bench/gpu_check.py [FAMILY ...]

Prints a line a comparison that is off, and one JSON receipt; exits 1 when anything is.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

import receipts

from sparkjax.verify import verify

GOLDEN = Path(__file__).parent.parent / "tests" / "golden"


def main() -> None:
    rows, ok = [], True
    names = sys.argv[1:] or sorted(path.name for path in GOLDEN.iterdir())
    for folder in (GOLDEN / name for name in names):
        for dtype in ("float32", "bfloat16"):
            report = verify(folder, dtype=dtype)
            logits = [line for line in report.lines if line.what.endswith("logits")]
            rows.append(
                {
                    "golden": folder.name,
                    "dtype": dtype,
                    "ok": report.ok,
                    "lines": len(report.lines),
                    "relative": max(line.relative or 0 for line in logits),
                    "absolute": max(line.absolute or 0 for line in logits),
                    "notes": [line.note for line in report.lines if line.note],
                }
            )
            for line in report.lines:
                if line.ok is False:
                    print(folder.name, dtype, line, file=sys.stderr)
            ok &= report.ok
    device = jax.devices()[0].device_kind
    receipts.show({"what": "goldens", "device": device, "ok": ok, "goldens": rows})
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
