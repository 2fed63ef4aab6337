"""What every benchmark prints: one JSON object with the machine and the versions in it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """Processor, cores and memory, as the operating system tells them."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    memory = int(Path("/proc/meminfo").read_text().split()[1]) / 2**20
    return {"cpu": model, "cores": os.cpu_count(), "memory_gib": round(memory, 1)}


def versions(*packages: str) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def show(receipt: dict[str, Any]) -> None:
    """Prints the receipt with the machine, the versions and the command that made it."""
    command = " ".join(["python", *sys.argv])
    whole = {
        **receipt,
        "machine": machine(),
        "versions": versions("sparkjax", "jax", "jaxlib", "numpy"),
        "command": command,
    }
    print(json.dumps(whole, indent=1))
