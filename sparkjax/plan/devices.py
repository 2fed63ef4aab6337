"""The constants of the model of time, one data file a device kind."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent / "devices"
MEASURED = Path("~/.cache/sparkjax/devices")
"""Where `sparkjax bench device` puts what a box has measured of itself."""


@dataclasses.dataclass(frozen=True)
class Device:
    """Rates of one device kind.

    Attributes:
      kind: the device's name as JAX reports it.
      memory_gib: memory that programs can use, in GiB.
      read_gb_s: rate of reading device memory, 1e9 bytes a second.
      bf16_tflops, fp8_tflops: dense matrix rates, 1e12 operations a second.
      launch_us: gap between two dependent kernels of a captured chain, microseconds.
      collective_us: {ranks: microseconds of one small reduction}.
      collective_gb_s: rate of a large collective for each rank, 1e9 bytes a second.
      source: where the constants are from.
    """

    kind: str
    memory_gib: float
    read_gb_s: float
    bf16_tflops: float
    fp8_tflops: float
    launch_us: float
    collective_us: dict[int, float]
    collective_gb_s: float
    source: str

    def collective(self, ranks: int, nbytes: float) -> float:
        """Seconds of one collective of so many bytes a rank over `ranks`."""
        if ranks == 1:
            return 0.0
        known = sorted(self.collective_us)
        near = min(known, key=lambda n: abs(n - ranks))
        return self.collective_us[near] * 1e-6 + nbytes / (self.collective_gb_s * 1e9)


def read_device(path: Path) -> Device:
    """Reads one device file.

    Raises:
      ValueError: a constant is missing, unknown or not a positive number; names file and field.
    """
    values: dict[str, Any] = yaml.safe_load(path.read_text())
    fields = {field.name for field in dataclasses.fields(Device)}
    missing, unknown = sorted(fields - set(values)), sorted(set(values) - fields)
    if missing or unknown:
        what = f"missing: {', '.join(missing)}" if missing else f"unknown: {', '.join(unknown)}"
        raise ValueError(f"{path}: {what}; a device file has {', '.join(sorted(fields))}")
    for name in fields - {"kind", "source", "collective_us"}:
        if not isinstance(values[name], int | float) or values[name] <= 0:
            raise ValueError(f"{path}: {name} is {values[name]!r}; it must be a positive number")
    return Device(**values)


def device(name: str, measured: Path = MEASURED) -> Device:
    """The constants of a device kind: what this box has measured of itself where it has, else the
    file that comes with sparkjax.

    Args:
      name: of a file without its ending ("gb10", "h200"), or a path to one.

    Raises:
      ValueError: there is no such file; names those there are.
    """
    if name.endswith(".yaml"):
        return read_device(Path(name))
    for folder in (measured.expanduser(), FOLDER):
        path = folder / f"{name}.yaml"
        if path.exists():
            return read_device(path)
    names = ", ".join(sorted(p.stem for p in FOLDER.glob("*.yaml")))
    raise ValueError(f"device is {name!r}; there are: {names}, or a path that ends in .yaml")


def file_name(kind: str) -> str:
    """The file of a device kind: "gb10.yaml" for "NVIDIA GB10"."""
    return kind.lower().removeprefix("nvidia ").replace(" ", "-") + ".yaml"
