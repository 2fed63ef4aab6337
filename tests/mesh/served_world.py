"""A served world of processes on this machine, for tests."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import quick
from cable import Cable

TESTS = Path(__file__).resolve().parent.parent
CACHE = TESTS.parent / ".cache" / "xla-ranks"
START_SECONDS = 400
SIZES = ["engine.slots=4", "engine.context=512", "engine.kv_tokens=4096", "engine.tiles=[64]"]
"""Tests that use the same share compiled programs."""


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def checkpoint(folder: Path) -> Path:
    """The golden llama with a tokenizer and a chat template."""
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(TESTS / "golden" / "llama" / name, folder / name)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TESTS / "data" / "tiny_chat" / name, folder / name)
    return folder


class Served:
    """The processes of one world, rank 0 first."""

    def __init__(
        self,
        folder: Path,
        ranks: int,
        transport: str = "shm",
        platform: str = "cpu",
        cable: Cable | None = None,
    ):
        self.folder, self.ranks, self.transport = folder, ranks, transport
        self.platform, self.cable = platform, cable
        self.model = checkpoint(folder / "tiny")
        self.http, *ports = free_ports(ranks + 1)
        hosts = ["127.0.0.1"] * ranks if cable is None else cable.addresses
        self.peers = [f"{host}:{port}" for host, port in zip(hosts, ports, strict=True)]
        self.secret = folder / "secret"
        self.secret.write_text("a secret of at least thirty-two letters")
        self.secret.chmod(0o600)
        self.url = f"http://127.0.0.1:{self.http}"
        self.processes: dict[int, subprocess.Popen] = {}

    def settings(self) -> list[str]:
        mesh = [
            f"mesh.peers={','.join(self.peers)}", f"mesh.tensor_parallel={self.ranks}",
            f"mesh.transport={self.transport}", f"mesh.secret={self.secret}",
        ]  # fmt: skip
        return [
            f"model.path={self.model}", f"http.port={self.http}", *SIZES,
            f"engine.compilation_cache={CACHE}",
            f"engine.journal={self.folder}/journal", "http.drain_seconds=20",
            *(mesh if self.ranks > 1 else []),
        ]  # fmt: skip

    def start(self, rank: int, *sets: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "sparkjax.serve"]
        command += ["--rank", str(rank)] if self.ranks > 1 else []
        for setting in [*self.settings(), *sets]:
            command += ["--set", setting]
        environ = {
            **os.environ,
            "PYTHONPATH": str(TESTS.parent),
            "JAX_PLATFORMS": self.platform,
            **quick.ENVIRON,
        }
        host = contextlib.nullcontext() if self.cable is None else self.cable.host(rank)
        with self.log(rank).open("a") as log, host:
            process = self.processes[rank] = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environ, cwd=TESTS.parent
            )
        return process

    def log(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.log"

    def logs(self) -> str:
        texts = [self.log(r).read_text()[-4000:] for r in self.processes]
        return "\n=====\n".join(texts)

    def wait_ready(self) -> None:
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            for rank, process in self.processes.items():
                assert process.poll() is None, f"rank {rank} ended\n{self.logs()}"
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/ready", timeout=5).status_code == 200:
                    return
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.processes[0].wait(0.1)
        raise AssertionError(f"not ready\n{self.logs()}")

    def wait(self, rank: int, seconds: float = 60) -> int:
        return self.processes[rank].wait(seconds)

    def codes(self, seconds: float = 60) -> dict[int, int]:
        return {rank: self.wait(rank, seconds) for rank in self.processes}

    def complete(self, prompt: str, max_tokens: int, **fields) -> httpx.Response:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        return httpx.post(f"{self.url}/v1/completions", json={**body, **fields}, timeout=120)

    @contextlib.contextmanager
    def stream(self, prompt: str, max_tokens: int) -> Iterator[Iterator[dict]]:
        """Events of a streamed completion."""
        body = {
            "model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0,
            "stream": True, "ignore_eos": True,
        }  # fmt: skip
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=120) as answer:
            assert answer.status_code == 200, answer.read()

            def events() -> Iterator[dict]:
                for line in answer.iter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        yield json.loads(line.removeprefix("data: "))

            yield events()

    def end(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait(30)


@contextlib.contextmanager
def served(
    folder: Path,
    ranks: int,
    transport: str = "shm",
    *sets: str,
    platform: str = "cpu",
    cable: Cable | None = None,
) -> Iterator[Served]:
    """A world that is ready. With a cable, whoever talks to it is on rank 0's host."""
    world = Served(folder, ranks, transport, platform, cable)
    try:
        for rank in range(ranks):
            world.start(rank, *sets)
        world.wait_ready()
        yield world
    finally:
        world.end()
