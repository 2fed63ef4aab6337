"""Make the virtual environment and install sparkjax into it, showing progress.

Run with any Python >= 3.11 and nothing else: `python3 scripts/install.py .venv --extra test`.
Dependencies are installed first and sparkjax after them without build isolation, so that the
native kernels are compiled against the very jaxlib they will run with, which is downloaded once.
pip's own words go to VENV/install.log; the terminal gets one line that moves.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST = (3, 11)
# Large enough to be worth a line where the terminal cannot rewrite one.
LARGE = 5e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("venv", type=Path)
    parser.add_argument("--extra", action="append", default=[], help="an extra of pyproject.toml")
    parser.add_argument("--with", action="append", default=[], dest="bare", metavar="PACKAGE",
                        help="a further package, installed without its dependencies")  # fmt: skip
    arguments = parser.parse_args()
    started = time.monotonic()
    python = environment(arguments.venv)
    pip = Pip(python, arguments.venv / "install.log")
    pip("pip", "--upgrade", "pip")
    pip("dependencies", *requirements(arguments.extra))
    pip("sparkjax and its native kernels", "--no-deps", "--no-build-isolation", "--editable", ".")
    for package in arguments.bare:
        pip(package, "--no-deps", package)
    print(f"Installed into {arguments.venv} in {time.monotonic() - started:.0f} s.", flush=True)


def environment(venv: Path) -> Path:
    """The interpreter of `venv`, which is created where it is missing or broken."""
    if sys.version_info < OLDEST:
        sys.exit(
            f"sparkjax needs Python {OLDEST[0]}.{OLDEST[1]} or newer; {sys.executable} is "
            f"{sys.version.split()[0]}. Name another one: make PYTHON=/path/to/python3"
        )
    python = venv / "bin" / "python"
    probe = [python, "-c", f"import sys, pip; sys.exit(sys.version_info < {OLDEST})"]
    if python.exists() and subprocess.run(probe, capture_output=True, check=False).returncode == 0:
        return python
    try:
        import ensurepip  # noqa: F401  (Debian ships venv without it)
    except ImportError:
        sys.exit(
            "This Python cannot make virtual environments with pip in them. On Debian or Ubuntu:\n"
            f"    apt install python{sys.version_info[0]}.{sys.version_info[1]}-venv"
        )
    print(f"Making {venv} with Python {sys.version.split()[0]}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", venv], check=True)
    return python


def requirements(extras: list[str]) -> list[str]:
    """What building, running and the extras need, as pyproject.toml says it."""
    import tomllib

    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)
    wanted = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    for extra in extras:
        wanted += project["project"]["optional-dependencies"][extra]
    return list(dict.fromkeys(wanted))


class Pip:
    """Runs `pip install` and tells how far it is."""

    def __init__(self, python: Path, log: Path):
        self.python, self.log = python, log
        self.terminal = sys.stdout.isatty()
        log.write_text("")

    def __call__(self, what: str, *arguments: str) -> None:
        command = [self.python, "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]
        # The installer that comes with Python may be too old to report its progress as lines.
        bar = [] if what == "pip" else ["--progress-bar", "raw"]
        self.say(f"Installing {what}", lasting=True)
        process = subprocess.Popen([*command, *bar, *arguments], cwd=ROOT, text=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
        name, packages = "", 0
        assert process.stdout is not None
        with self.log.open("a") as log:
            for line in process.stdout:
                if progress := re.match(r"Progress (\d+) of (\d+)", line):
                    done, total = map(int, progress.groups())
                    if total:
                        self.say(f"  {packages:3} packages | {name} {total / 1e6:.0f} MB {done / total:4.0%}")
                    continue
                log.write(line)
                if found := re.match(r"\s*Downloading (\S+?)(?:\.metadata)? \((.*)\)", line):
                    name = found[1].rpartition("/")[2].split("-")[0]
                    self.say(f"  {name} {found[2]}", lasting=megabytes(found[2]) >= LARGE / 1e6)
                elif line.startswith("Collecting"):
                    packages += 1
                    self.say(f"  {packages:3} packages | {line.split()[1]}")
                elif line.startswith("Installing collected packages"):
                    count = line.count(",") + 1
                    self.say(f"  unpacking {count} package" + "s" * (count > 1), lasting=count > 1)
        self.say("")
        if process.wait():
            tail = [text for text in self.log.read_text().splitlines() if text.strip()][-25:]
            sys.exit("\n".join([*tail, "", f"Installing {what} failed; all of it is in {self.log}"]))

    def say(self, text: str, lasting: bool = False) -> None:
        """A line that stays, or one that the next replaces (left out where nothing can be)."""
        if self.terminal:
            print(f"\r\033[K{text[:100]}", end="\n" if lasting else "", flush=True)
        elif lasting:
            print(text, flush=True)


def megabytes(text: str) -> float:
    number, _, unit = text.partition(" ")
    try:
        return float(number) * {"GB": 1000, "MB": 1, "kB": 1e-3}.get(unit, 0)
    except ValueError:
        return 0


if __name__ == "__main__":
    main()
