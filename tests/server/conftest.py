"""A real server process over a tiny real model."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

TESTS = Path(__file__).parent.parent
START_SECONDS = 600


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class Server:
    """A running `python -m sparkjax.serve`."""

    def __init__(self, process: subprocess.Popen, url: str, log: Path):
        self.process, self.url, self.log = process, url, log

    @property
    def model(self) -> str:
        return httpx.get(f"{self.url}/v1/models").json()["data"][0]["id"]

    def metrics(self) -> dict[str, float]:
        """Samples by name, labels left out (the last of several wins)."""
        found = {}
        for line in httpx.get(f"{self.url}/metrics").text.splitlines():
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                found[name.split("{")[0]] = float(value)
        return found

    def resources(self) -> dict[str, int]:
        """Resident KiB, threads and open files of the process."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        values = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        return {
            "rss": int(values["VmRSS"].split()[0]),
            "threads": int(values["Threads"]),
            "files": len(list(Path(f"/proc/{self.process.pid}/fd").iterdir())),
        }


@contextlib.contextmanager
def serving(folder: Path, *sets: str, log_folder: Path | None = None) -> Iterator[Server]:
    """Serves the (tiny) model from `folder` with further settings, until the block ends."""
    port = free_port()
    command = [sys.executable, "-m", "sparkjax.serve"]
    settings = [
        f"model.path={folder}",
        f"http.port={port}",
        "engine.context=2048",
        "engine.tiles=[16,64]",
        "engine.rows=[2,8]",
        "engine.page_size=16",
        "engine.kv_tokens=8192",
        "engine.queue=256",
        *sets,
    ]
    for setting in settings:
        command += ["--set", setting]
    log = (log_folder or folder.parent) / f"server-{port}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, cwd=TESTS.parent
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_ready(process, url, log)
        yield Server(process, url, log)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                raise


def wait_ready(process: subprocess.Popen, url: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    poll = 0.05
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise AssertionError(f"the server ended with {process.returncode}:\n{log.read_text()}")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/ready").status_code == 200:
                return
        process_wait(process, poll)
    raise AssertionError(f"not ready after {START_SECONDS} s:\n{log.read_text()}")


def process_wait(process: subprocess.Popen, seconds: float) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden llama with a byte-level tokenizer and a chat template: a complete checkpoint."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(TESTS / "golden" / "llama" / name, folder / name)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TESTS / "data" / "tiny_chat" / name, folder / name)
    return folder


@pytest.fixture(scope="session")
def server(tiny: Path) -> Iterator[Server]:
    with serving(tiny) as running:
        yield running


@pytest.fixture(scope="session")
def start() -> Any:
    """`serving`, for tests of models of their own."""
    return serving
