"""Serving over several processes: one rank's way from its address to its exit code.

Every rank compares configuration, model files, versions and devices with the others before it loads
a weight; loads, compiles, goes round once with all, and is ready. Then rank 0 decides and answers
clients, and the others apply the records that it writes. Exit codes: 0 after an orderly end, 1 when
this rank could not start, 2 when rank 0 failed while it served, 3 when another rank was released by
a failure elsewhere.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import secrets
import signal
import sys
import threading
import time
from typing import Any, NoReturn

import msgspec

from .config import Config, locate
from .mesh.transports import Transport, TransportError
from .mesh.world import compare, roster
from .mesh.world.world import World, WorldError

log = logging.getLogger("sparkjax")

STARTUP_ERROR, ENGINE_FAILURE, RELEASED = 1, 2, 3
BOOT_PATIENCE = 3600.0
"""Seconds that a collective waits while programs compile: a rank that dies ends the wait anyway."""
PATIENCE = 30.0
"""Seconds that a collective waits while serving, for a rank that lives but stands still."""
TOGETHER = 0.5
"""Seconds in which all ranks that are told to stop together hear of it."""
LAST_WORDS = 1.0
"""Seconds in which the world may say which rank failed, after a collective did."""


class Session:
    """This process's membership of a world, from the handshake on."""

    def __init__(self, config: Config, world: World):
        self.config, self.world = config, world
        self.transport: Transport | None = None
        self.serving = False

    @property
    def rank(self) -> int:
        return self.world.rank

    @classmethod
    def join(cls, config: Config) -> Session:
        """Meets the other ranks and compares what all must have in common.

        Raises:
          RosterError, WorldError: with one line for every difference.
        """
        mesh = config.mesh
        rank = roster.own_rank(mesh.peers, mesh.rank)
        addresses = [roster.parse(peer) for peer in mesh.peers]
        secret = roster.read_secret(mesh.secret, mesh.peers)
        mine = facts(config)
        log.info("rank %d of %d; rank 0 is at %s", rank, len(addresses), addresses[0])
        world = World.form(
            addresses, rank, secret, join=mesh.join_seconds, silence=mesh.silence_seconds
        )
        session = cls(config, world)
        world.on_failure = session._failed
        session.agree("facts", mine)
        return session

    def agree(self, stage: str, mine: compare.Facts) -> None:
        """Compares facts between all ranks. Raises WorldError with every difference."""
        self.world.exchange(stage, compare.encode(mine), compare.agree)

    def open_transport(self) -> None:
        """Opens what carries the collectives, then compares the devices.

        Raises:
          TransportError, WorldError.
        """
        mesh, world = self.config.mesh, self.world
        name = f"sparkjax-{secrets.token_hex(8)}"
        name = world.exchange("transport", b"", lambda _: name.encode()).decode()
        if mesh.transport == "shm":
            from .mesh.transports.shm import Shm
            from .model import here

            choose_gpu(world.rank, world.ranks)
            shm = self.transport = Shm.open(
                name,
                world.rank,
                world.ranks,
                timeout=BOOT_PATIENCE,
                join=mesh.join_seconds,
                platform=here().platform,
            )
            if shm.platform == "cuda":
                where = "one another's memory" if shm.direct else "the host's memory"
                log.info("shm: GPUs read %s", where)
        elif mesh.transport == "fabric":
            from .mesh.transports.fabric.transport import Fabric, Settings
            from .model import here

            self.transport = Fabric.open(
                world.gather,
                world.rank,
                world.ranks,
                roster.parse(mesh.peers[world.rank]).host,
                Settings(
                    shape=mesh.shape, rails=mesh.rails, devices=mesh.devices,
                    pace_gbps=mesh.pace_gbps, proxy_core=mesh.proxy_core,
                ),
                timeout=BOOT_PATIENCE,
                platform=here().platform,
            )  # fmt: skip
        else:
            start_xla(roster.parse(mesh.peers[0]), world.rank, world.ranks, mesh.join_seconds)
            world.exchange("joined")
            meet(world.ranks)
        self.agree("devices", devices())

    def context(self, context: Any) -> Any:
        """A model's context with this world's collectives."""
        return dataclasses.replace(context, transport=self.transport)

    def compare_weights(self, model: Any) -> None:
        """Compares what the ranks' devices hold of the parameters that all hold alike.

        Raises:
          WorldError: names the rank and the parameter.
        """
        if not self.config.weights.check:
            return
        from .models import params
        from .weights import digest

        ranks = model.context.ranks
        places = params.leaves_of(params.specs(model.declared(ranks), ranks))
        replicated = {path for path, spec in places if not any(spec)}
        (held,) = digest.of_device(model.params).values()

        def agree(brought: list[bytes]) -> bytes:
            digests = [msgspec.msgpack.decode(data, type=digest.Digests) for data in brought]
            if lines := digest.disagreements(dict(enumerate(digests)), replicated):
                raise WorldError("the ranks hold different weights:", *lines[:20])
            return b""

        self.world.exchange("weights", compare.encode(held), agree)

    def settle(self, limits: Any) -> Any:
        """The limits that fit on every rank: rank 0's, with the fewest pages of all."""
        from .engine.records import Limits

        def fewest(brought: list[bytes]) -> bytes:
            all_limits = [msgspec.msgpack.decode(b, type=Limits) for b in brought]
            pages = min(limits.pages for limits in all_limits)
            settled = [msgspec.structs.replace(limits, pages=pages) for limits in all_limits]
            flat = [
                {f"limit {k}": str(v) for k, v in msgspec.structs.asdict(s).items()}
                for s in settled
            ]
            if lines := compare.differences(flat):
                raise WorldError("the ranks do not agree:", *lines)
            return msgspec.msgpack.encode(settled[0])

        data = self.world.exchange("limits", msgspec.msgpack.encode(limits), fewest)
        return msgspec.msgpack.decode(data, type=Limits)

    def ready(self) -> None:
        """One round trip over every rank; from here on the world serves."""
        if self.transport is not None:
            self.transport.patience(PATIENCE)
        self.world.exchange("ready")
        self.serving = True

    def record(self, tick: Any) -> None:
        """Rank 0: one record to every rank. Raises WorldError once the world has ended."""
        from .engine.journal import encode

        self.world.publish(encode(tick))
        self.world.applied = tick.number + 1

    def explain(self, error: Exception) -> str:
        """Why the engine failed: a collective's error comes as fast as the world's own verdict,
        which names the rank."""
        until = time.monotonic() + LAST_WORDS
        while self.world.failure is None and time.monotonic() < until:
            time.sleep(0.02)
        collective = self.transport.failure if self.transport is not None else ""
        return self.world.failure or collective or f"{type(error).__name__}: {error}"

    def _failed(self, reason: str) -> None:
        """The world has ended (called from any thread). Outside of rank 0's service nobody waits
        for whatever the main thread is in: a compilation, a load, a collective."""
        if self.transport is not None:
            self.transport.abort(reason)
        if self.serving and self.rank == 0:
            return
        threading.Thread(target=self._leave, daemon=True).start()

    def _leave(self) -> None:
        time.sleep(0.3)  # the main thread may have the better words
        leave(RELEASED if self.rank else STARTUP_ERROR)


def facts(config: Config) -> compare.Facts:
    """What must be equal on all ranks, known before any weight is read or device touched."""
    from .config import shared
    from .versions import versions
    from .weights import fingerprint

    found = {f"config {key}": repr(value) for key, value in shared(config).items()}
    path = locate(config.model.path or "", config.weights.folder)
    found |= {f"model {name}": print_ for name, print_ in fingerprint.fingerprints(path).items()}
    return found | {f"version {name}": version for name, version in versions().items()}


PROBLEM = "problem"
"""Begins the names of facts that say what is wrong with this host."""


def checks(config: Config) -> compare.Facts:
    """`facts`, and what can be seen of this host's links before a world starts."""
    found = facts(config)
    mesh = config.mesh
    if mesh.transport == "fabric" and len(mesh.peers) > 1:
        from .mesh.transports.fabric import check

        at = next((i for i, p in enumerate(mesh.peers) if roster.is_here(roster.parse(p).host)), 0)
        seen, problems = check.look(
            roster.parse(mesh.peers[at]).host, len(mesh.peers), mesh.shape, mesh.rails, mesh.devices
        )
        found |= seen | {f"{PROBLEM} {n}": text for n, text in enumerate(problems)}
    return found


def devices() -> compare.Facts:
    """What programs are compiled for and with, on this rank."""
    import jax

    from .kernels import native

    device = jax.local_devices()[0]
    found = {
        "device platform": device.platform,
        "device kind": device.device_kind,
        "device count": str(len(jax.local_devices())),
    }
    if device.platform == "cpu":
        found["kernels native"] = "yes" if native.available() else "no"
    return found


def choose_gpu(rank: int, ranks: int) -> None:
    """Leaves this rank its own GPU of the host's, or its part of the memory of one that it shares.
    Nothing where programs run on a CPU."""
    import jax

    from . import config
    from .mesh import gpus

    settings: Any = jax.config
    platforms = (settings.jax_platforms or "cuda").split(",")
    names = config.visible_gpus()
    if names is None:
        names = [str(n) for n in range(gpus.count())]
    if not names or not {"cuda", "gpu"} & set(platforms):
        return
    mine, part = gpus.place(rank, ranks, len(names))
    config.show_gpu(names[mine])
    jax.config.update("jax_pjrt_client_create_options", {"memory_fraction": part})
    log.info(
        "rank %d computes on GPU %s, with %.0f %% of its memory", rank, names[mine], 100 * part
    )


def start_xla(rank0: roster.Address, rank: int, ranks: int, seconds: float) -> None:
    """Joins `jax.distributed`, whose coordinator listens one port above rank 0's.

    Raises:
      TransportError: not all came.
    """
    import jax

    # A process that is gone is the world's business: it knows sooner, and says which rank it was.
    jax.config.update("jax_enable_recoverability", True)
    try:
        jax.distributed.initialize(
            str(roster.Address(rank0.host, rank0.port + 1)),
            ranks,
            rank,
            initialization_timeout=int(seconds),
        )
    except RuntimeError as error:
        raise TransportError(f"xla: rank {rank}: {error}") from error


def meet(ranks: int) -> None:
    """One small collective of XLA's over all ranks. Its transports connect at their first use and
    wait half a minute for one another: later, some ranks may still compile while others run.

    Raises:
      TransportError: not all came.
    """
    import jax
    import numpy as np
    from jax.sharding import PartitionSpec

    from .mesh import spmd
    from .mesh.context import RANKS

    everywhere = PartitionSpec()
    gather = spmd.spmd(
        lambda x: jax.lax.all_gather(x, RANKS), spmd.make_mesh(ranks), everywhere, everywhere
    )
    try:
        jax.block_until_ready(jax.jit(gather)(np.zeros(1, np.float32)))
    except jax.errors.JaxRuntimeError as error:
        raise TransportError(f"xla: {error}") from error


def run(config: Config) -> int:
    """Serves as one rank. Ends the process: threads of a transport must not hold it."""
    from jax.errors import JaxRuntimeError

    from .serve import StartupError, check_keys, serve_engine, start, take_port

    started = time.monotonic()
    session: Session | None = None
    sock = None
    try:
        rank = roster.own_rank(config.mesh.peers, config.mesh.rank)
        if rank == 0:
            check_keys(config.http.api_keys)
            sock = take_port(config.http.host, config.http.port)
        session = Session.join(config)
        session.open_transport()
        model, engine = start(config, session)
        front: tuple[Any, Any] = (None, None)
        if rank == 0:  # what keeps clients from being served keeps the world from being ready
            front = serve_engine(
                config, model, engine, explain=session.explain, ranks=session.world.states
            )
        session.ready()
        log.info("rank %d is ready after %.1f s", rank, time.monotonic() - started)
    except (
        StartupError,
        TransportError,
        WorldError,
        roster.RosterError,
        JaxRuntimeError,  # a collective that was ended while programs ran for the first time
        ValueError,
        OSError,
    ) as error:
        for line in str(error).splitlines():
            log.error("%s", line)
        elsewhere = session is not None and session.world.failure is not None
        if session is not None and not isinstance(error, WorldError):
            session.world.fail(f"rank {session.rank} cannot start: {error}")
        time.sleep(0.2)  # the last words are on their way
        leave(RELEASED if elsewhere and session is not None and session.rank else STARTUP_ERROR)
    if session.rank == 0:
        leave(_serve(config, session, *front, sock))
    leave(_follow(session, engine))


def _serve(config: Config, session: Session, served: Any, service: Any, sock: Any) -> int:
    """Rank 0: the API over the engine, until a signal or a failure."""
    from .api.server import serve_forever

    world = session.world

    def failed(reason: str) -> None:
        session._failed(reason)
        service.fail(reason)

    world.on_failure = failed
    asked = threading.Event()

    def stop() -> None:
        if service.state == "ready":  # a second signal would end this rank at once
            os.kill(os.getpid(), signal.SIGTERM)

    def leaving(reason: str) -> None:
        log.info("%s", reason)
        if not asked.is_set():
            asked.set()
            # Whoever stops all ranks has most likely told this one, too.
            threading.Timer(TOGETHER, stop).start()

    world.on_leave = leaving
    if world.failure is not None:
        service.fail(world.failure)
    code = serve_forever(served, service, config, sock)
    if code:
        world.fail(service.failure or "rank 0's engine failed")
    else:
        world.finish()
    time.sleep(0.2)  # the last words are on their way
    return code


def _follow(session: Session, engine: Any) -> int:
    """Another rank: applies rank 0's records until the world ends."""
    from .engine.journal import Decoder
    from .engine.records import Tick

    world = session.world

    def asked(number: int, frame: Any) -> None:
        signal.signal(number, lambda n, f: leave(128 + n))
        reason = f"rank {session.rank} was asked to stop by {signal.Signals(number).name}"
        log.info("%s: the world ends in order", reason)
        threading.Thread(target=world.leave, args=(reason,), daemon=True).start()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, asked)
    decoder = Decoder()
    try:
        for frame in world.frames():
            for record in decoder.feed(frame):
                if isinstance(record, Tick):
                    engine.follow(record)
                    world.applied = record.number + 1
    except WorldError as error:
        log.error("%s", error)
        return RELEASED
    except Exception as error:
        log.exception("rank %d failed", session.rank)
        world.fail(f"rank {session.rank}: {session.explain(error)}")
        time.sleep(0.2)
        return RELEASED
    log.info("the world ended in order after %d records", world.applied)
    return 0


def leave(code: int) -> NoReturn:
    """Ends the process now."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
