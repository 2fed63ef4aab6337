"""A host's agent: starts, watches and stops the ranks of one configuration that run on this host.

Agents listen at their host's address in `mesh.peers`, port `mesh.agent_port`, and take a handful of
verbs from whoever has the world's secret. Nothing on the wire names a file or a command: an agent
runs `python -m sparkjax.serve` with the configuration file that it was started with, and reads that
file again for every start.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from .config import Config, ConfigError, load
from .mesh.world import roster
from .mesh.world.door import STRANGERS, admit
from .mesh.world.messages import Answer, Ask
from .mesh.world.wire import Channel, WireError

log = logging.getLogger("sparkjax.agent")

VERBS = ("up", "down", "restart", "status", "health", "logs", "check", "quit")
PATIENCE = 30.0
"""Seconds that a verb may take, a stop apart."""
STOP_SECONDS = 20.0
"""Seconds beyond `http.drain_seconds` after which a rank that was told to stop is killed."""
STEADY = 60.0
"""Seconds of life after which a rank's next failure counts as its first."""
MOST_FAILURES = 5
"""Failures in a row after which a rank is not started again."""
LOG_BYTES = 64 << 20
MOST_LINES = 10_000


class AgentError(RuntimeError):
    """An agent cannot be reached or refuses; the message says why."""


def hosts(config: Config) -> dict[str, list[int]]:
    """Host -> its ranks. A configuration without peers is one process on this machine."""
    found: dict[str, list[int]] = {}
    for rank, peer in enumerate(config.mesh.peers or ("127.0.0.1",)):
        found.setdefault(roster.parse(peer).host, []).append(rank)
    return found


def own_host(config: Config) -> str:
    """The host of the configuration that is this machine. Raises RosterError."""
    here = [host for host in hosts(config) if roster.is_here(host)]
    if len(here) != 1:
        what = "none" if not here else f"several ({', '.join(here)})"
        raise roster.RosterError(f"{what} of the hosts of mesh.peers is this machine")
    return here[0]


def folder_of(config: Config) -> Path:
    """Where an agent keeps its ranks' logs."""
    name = hashlib.sha256(repr((config.mesh.peers, config.mesh.agent_port)).encode()).hexdigest()
    return Path("~/.cache/sparkjax/worlds").expanduser() / name[:16]


@dataclasses.dataclass
class Child:
    """One rank on this host."""

    rank: int
    wanted: bool = False
    process: subprocess.Popen | None = None
    started: float = 0.0
    code: int | None = None
    failures: int = 0
    next_start: float = 0.0

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def state(self) -> dict[str, Any]:
        """For people and programs."""
        if self.running:
            what = "running"
        elif not self.wanted:
            what = "stopped"
        elif self.failures >= MOST_FAILURES:
            what = "failed"
        else:
            what = "restarting" if self.failures else "starting"
        return {
            "rank": self.rank,
            "state": what,
            "pid": self.process.pid if self.process is not None and self.running else None,
            "seconds": round(time.time() - self.started, 1) if self.running else None,
            "exit_code": self.code,
            "failures": self.failures,
        }


class Agent:
    """See the module's page.

    Args:
      path: the configuration file.
      command: of a rank, without its configuration (tests give another one).
    """

    def __init__(self, path: Path, command: tuple[str, ...] = ()):
        self.path = path.absolute()
        self.config = load(self.path)
        self.host = own_host(self.config)
        self.secret = roster.read_secret(self.config.mesh.secret, self.config.mesh.peers)
        self.folder = folder_of(self.config)
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._command = command or (sys.executable, "-m", "sparkjax.serve")
        self.children = {rank: Child(rank) for rank in hosts(self.config)[self.host]}
        self._lock = threading.RLock()
        self._quit = threading.Event()

    def run(self) -> None:
        """Serves verbs until told to quit (or by a signal, which stops the ranks, too).

        Raises:
          AgentError: the address is taken.
        """
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        door = socket.socket(family, socket.SOCK_STREAM)
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        where = roster.Address(self.host, self.config.mesh.agent_port)
        try:
            door.bind(where)
            door.listen(STRANGERS)
        except OSError as error:
            door.close()
            raise AgentError(f"mesh.agent_port: {where}: {error.strerror}") from error
        log.info("agent of rank %s at %s", ", ".join(map(str, self.children)), where)
        threading.Thread(target=admit, args=(door, self._serve), daemon=True).start()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: self._quit.set())
        while not self._quit.wait(0.2):
            self._supervise()
        door.close()
        self._stop_all()

    # --- Ranks --------------------------------------------------------------------------------------

    def _start(self, child: Child) -> None:
        path = self.folder / f"rank{child.rank}.log"
        if path.exists() and path.stat().st_size > LOG_BYTES:
            path.replace(path.with_suffix(".log.1"))
        command = [*self._command, "--config", str(self.path)]
        if self.config.mesh.peers:
            command += ["--rank", str(child.rank)]
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # somebody may have emptied the cache
        with path.open("ab") as output:
            child.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
        child.started, child.code = time.time(), None
        log.info("rank %d started as process %d", child.rank, child.process.pid)

    def _supervise(self) -> None:
        """Starts again what failed, later each time."""
        with self._lock:
            for child in self.children.values():
                if child.process is not None and child.code is None and not child.running:
                    child.code = child.process.returncode
                    log.info("rank %d ended with %s", child.rank, child.code)
                    if child.code == 0:
                        child.wanted = False
                        continue
                    self._failed(child, time.time() - child.started)
                due = time.time() >= child.next_start and child.failures < MOST_FAILURES
                if child.wanted and not child.running and due:
                    try:
                        self._start(child)
                    except OSError as error:  # a full disk must not end the agent: ranks run on
                        log.error("rank %d cannot be started: %s", child.rank, error)
                        self._failed(child, 0.0)

    def _failed(self, child: Child, lived: float) -> None:
        """Notes a failure, after so many seconds of life, and when the next start may come."""
        child.failures = 1 if lived > STEADY else child.failures + 1
        child.next_start = time.time() + min(2.0 ** (child.failures - 1), 30)
        if not self.config.mesh.restart:
            child.failures = MOST_FAILURES

    def _stop_all(self) -> None:
        with self._lock:
            running = [c for c in self.children.values() if c.running]
            for child in self.children.values():
                child.wanted = False
            for child in running:
                assert child.process is not None
                child.process.terminate()
        until = time.monotonic() + self.config.http.drain_seconds + STOP_SECONDS
        for child in running:
            assert child.process is not None
            try:
                child.process.wait(max(until - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                log.warning("rank %d does not stop: killed", child.rank)
                child.process.kill()
                child.process.wait()
            child.code = child.process.returncode  # a stop that was asked for is no failure

    # --- Verbs --------------------------------------------------------------------------------------

    def answer(self, ask: Ask) -> Any:
        """What a verb returns. Raises AgentError or ConfigError."""
        match ask.verb:
            case "up":
                self._up()
            case "down":
                self._stop_all()
            case "restart":
                self._stop_all()
                self._up()
            case "logs":
                return {str(r): self._tail(r, min(ask.lines, MOST_LINES)) for r in self.children}
            case "health":
                return self._health()
            case "check":
                from .ranks import checks

                return checks(load(self.path))
            case "quit":
                self._quit.set()
            case "status":
                pass
            case _:
                raise AgentError(f"unknown verb {ask.verb!r}; there are {', '.join(VERBS)}")
        return [child.state() for child in self.children.values()]

    def _up(self) -> None:
        fresh = load(self.path)
        if (fresh.mesh.peers, fresh.mesh.agent_port) != (
            self.config.mesh.peers,
            self.config.mesh.agent_port,
        ):
            raise AgentError(
                "mesh.peers or mesh.agent_port has changed in the file: end this agent "
                "(sparkjax down --agents) and start it again"
            )
        with self._lock:
            self.config = fresh
            for child in self.children.values():
                child.wanted, child.failures, child.next_start = True, 0, 0.0

    def _tail(self, rank: int, lines: int) -> list[str]:
        path = self.folder / f"rank{rank}.log"
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - (4 << 20), 0))
            text = file.read().decode(errors="replace")
        return list(deque(text.splitlines(), maxlen=lines))

    def _health(self) -> dict[str, Any]:
        """The ranks here and, on rank 0's host, what the server says of itself."""
        found: dict[str, Any] = {"ranks": [child.state() for child in self.children.values()]}
        if 0 in self.children:
            from urllib.error import URLError
            from urllib.request import Request, urlopen

            headers = {}
            if self.config.http.api_keys is not None:
                lines = Path(self.config.http.api_keys).read_text(encoding="utf-8").splitlines()
                keys = [line for line in lines if line.strip() and not line.startswith("#")]
                headers = {"Authorization": f"Bearer {keys[0].strip()}"} if keys else {}
            host = self.config.http.host
            host = "127.0.0.1" if host in ("0.0.0.0", "::") else host
            for route in ("health", "ready"):
                url = f"http://{roster.Address(host, self.config.http.port)}/{route}"
                try:
                    with urlopen(Request(url, headers=headers), timeout=5) as answer:
                        found[route] = answer.status == 200
                except (URLError, OSError):
                    found[route] = False
        return found

    # --- The door -----------------------------------------------------------------------------------

    def _serve(self, sock: socket.socket) -> None:
        channel = Channel(sock, self.secret, server=True, seconds=5.0)
        try:
            ask = channel.receive(5.0)
            if not isinstance(ask, Ask):
                return
            try:
                answer = Answer(json.dumps(self.answer(ask)).encode())
            except (AgentError, ConfigError, OSError, ValueError) as error:
                answer = Answer(b"", str(error))
            channel.send(answer)
        finally:
            channel.close()


def ask(config: Config, host: str, verb: str, lines: int = 0) -> Any:
    """A verb's answer from the agent of `host`.

    Raises:
      AgentError: nobody answers there, or the agent refuses.
    """
    secret = roster.read_secret(config.mesh.secret, config.mesh.peers)
    where = roster.Address(host, config.mesh.agent_port)
    stopping = config.http.drain_seconds + STOP_SECONDS if verb in ("down", "restart") else 0
    try:
        sock = socket.create_connection(where, timeout=3.0)
        with contextlib.closing(Channel(sock, secret, server=False)) as channel:
            channel.send(Ask(verb, lines))
            answer = channel.receive(PATIENCE + stopping)
    except WireError as error:
        raise AgentError(f"{where}: {error} (is mesh.secret the same file there?)") from error
    except OSError as error:
        raise AgentError(f"no agent at {where}: {error.strerror or error}") from error
    if not isinstance(answer, Answer):
        raise AgentError(f"{where}: not an agent")
    if answer.error:
        raise AgentError(f"{where}: {answer.error}")
    return json.loads(answer.data)


def ask_all(config: Config, verb: str, lines: int = 0) -> dict[str, Any]:
    """Every host's answer, asked at the same time; an AgentError stands for one that has none."""
    found: dict[str, Any] = {}

    def one(host: str) -> None:
        try:
            found[host] = ask(config, host, verb, lines)
        except (AgentError, roster.RosterError) as error:
            found[host] = error

    threads = [threading.Thread(target=one, args=(host,)) for host in hosts(config)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {host: found[host] for host in hosts(config)}


def start_here(path: Path) -> None:
    """Starts this host's agent in the background, unless one answers.

    Raises:
      AgentError: it does not come up; names its log.
    """
    config = load(path)
    host = own_host(config)
    with contextlib.suppress(AgentError):
        ask(config, host, "status")
        return
    folder = folder_of(config)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    output = folder / "agent.log"
    command = [sys.executable, "-m", "sparkjax.agent", str(path.absolute())]
    with output.open("ab") as log_file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log_file, stderr=subprocess.STDOUT,
            start_new_session=True, cwd=os.sep,
        )  # fmt: skip
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(AgentError):
            ask(config, host, "status")
            return
        time.sleep(0.1)
    raise AgentError(f"the agent does not start; {output} says why")


def main() -> int:
    """`python -m sparkjax.agent FILE`: one host's agent, in the foreground."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        Agent(Path(sys.argv[1])).run()
    except (AgentError, ConfigError, roster.RosterError) as error:
        log.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
