"""The scripted server, and where real clients are installed (`make test-clients`)."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.conftest import Api, Socket

from . import scripted

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
VENV = ROOT / ".venv-clients" / "bin"
NODE_MODULES = ROOT / ".venv-clients" / "node" / "node_modules"
SECONDS = 240


@pytest.fixture(scope="session")
def scripted_server() -> Iterator[Socket]:
    api = Api(**scripted.options())
    api.core.step_seconds = 0.001  # somebody who stops an answer finds it unfinished
    server = Socket(api)
    yield server
    server.close()
    api.close()


def run(command: list[str], cwd: Path | None = None, **env: str) -> str:
    """Runs a client; returns what it printed."""
    import os

    # A client finds this server and nothing else: no proxy, no key of another service.
    clean = {k: v for k, v in os.environ.items() if not k.lower().endswith(("_proxy", "_api_key"))}
    done = subprocess.run(
        command, cwd=cwd, env=clean | env, capture_output=True, text=True, timeout=SECONDS,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    return done.stdout


def python_with(*packages: str) -> str:
    """The clients' Python; skips the test where a package is missing."""
    python = VENV / "python"
    if not python.exists():
        pytest.skip("needs .venv-clients: make test-clients")
    for package in packages:
        done = subprocess.run([python, "-c", f"import {package}"], capture_output=True)
        if done.returncode:
            pytest.skip(f"needs the Python package {package}: make test-clients")
    return str(python)


def node_with(package: str) -> str:
    """Node; skips the test where it or a package is missing."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node")
    if not (NODE_MODULES / package).exists():
        pytest.skip(f"needs the npm package {package}: make test-clients")
    return node
