"""python -m sparkjax.serve: one host of a served model.

The order of a start: check the configuration, take the port, load the weights, compile every
program, serve. Exit codes: 0 after an orderly end, 1 when it could not start, 2 when the engine
failed while it served.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .config import Config, locate

log = logging.getLogger("sparkjax")

STARTUP_ERROR, ENGINE_FAILURE = 1, 2


class StartupError(RuntimeError):
    """The server cannot start; the message says what to change."""


def run(config: Config) -> int:
    """Serves until a signal ends it. Returns the exit code."""
    started = time.monotonic()
    set_up_logging(config)
    if len(config.mesh.peers) > 1:
        from .ranks import run as run_rank

        return run_rank(config)
    try:
        check_keys(config.http.api_keys)
        with take_port(config.http.host, config.http.port) as sock:
            model, engine = start(config)
            served, service = serve_engine(config, model, engine)
            log.info("%s is ready after %.1f s", served.id, time.monotonic() - started)
            from .api.server import serve_forever

            return serve_forever(served, service, config, sock)
    except StartupError as error:
        log.error("%s", error)
        return STARTUP_ERROR


def serve_engine(config: Config, model: Any, engine: Any, **options: Any) -> tuple[Any, Any]:
    """The model as the API sees it, and the running service of a warm engine.

    Args:
      **options: of `EngineService`.

    Raises:
      StartupError: the checkpoint has no tokenizer, or its chat template is none.
    """
    from .api.served import served_model
    from .engine.service import EngineService
    from .weights.errors import CheckpointError

    try:
        served = served_model(model, engine.limits, config)
    except (CheckpointError, OSError) as error:
        raise StartupError(str(error)) from error
    service = EngineService(engine, **options)
    service.start()
    return served, service


def start(config: Config, session: Any = None) -> tuple[Any, Any]:
    """The loaded model and its warm engine.

    Args:
      session: a `ranks.Session` where this process is one rank of several.

    Raises:
      StartupError: the model cannot be loaded, or does not fit.
    """
    from . import compiles
    from .engine.engine import Engine
    from .engine.limits import make_limits
    from .model import here
    from .models.config import UnsupportedConfig
    from .weights.errors import CheckpointError

    if config.model.path is None:
        raise StartupError("model.path is not set: a checkpoint directory or a .gguf file")
    compiles.use_cache(config.engine.compilation_cache)
    settings = config.engine
    try:
        path = locate(config.model.path, config.weights.folder)
        dtype = None if config.model.dtype == "auto" else config.model.dtype
        context = here(dtype, config.mesh.tensor_parallel, tuple(config.kernels.items()))
        if session is not None:
            context = session.context(context)
        model = load_model(config, path, context)
        if session is not None:
            session.compare_weights(model)
        limits = make_limits(
            model,
            slots=settings.slots,
            context=settings.context,
            kv_tokens=settings.kv_tokens,
            page_size=settings.page_size,
            tiles=settings.tiles,
            rows=settings.rows,
            queue=settings.queue,
            busy_tiles=settings.busy_tiles,
            idle_tiles=settings.idle_tiles,
            admission=settings.admission,
            window=settings.window,
        )
        if session is not None:
            limits = session.settle(limits)
    except (CheckpointError, UnsupportedConfig, ValueError, OSError) as error:
        raise StartupError(str(error)) from error
    record, applied = crash_log(config, limits, session)
    engine = Engine(model, limits, record, applied)
    with progress("compiling") as advance:
        engine.runner.warm(lambda name, done, total: advance(done, total, name))
    log.info(
        "cache pool: %d tokens in pages of %d; %d slots of up to %d tokens",
        limits.pages * limits.page_size,
        limits.page_size,
        limits.slots,
        limits.context,
    )
    return model, engine


def load_model(config: Config, path: Path, context: Any) -> Any:
    """The model of the configuration's weights, under a progress bar.

    Raises:
      CheckpointError, UnsupportedConfig, ValueError, OSError: see `Model.load`; and where it does
        not fit.
    """
    from .engine import budget
    from .model import Model
    from .weights.load import Images, Reading

    weights, engine = config.weights, config.engine

    def fits(family: Any, values: Any, held: Any) -> None:
        budget.require(
            family, values, context, held,
            slots=engine.slots, kv_tokens=engine.kv_tokens, page_size=engine.page_size,
            tile=max(engine.tiles) if engine.tiles else None,
        )  # fmt: skip

    with progress(f"loading {path.name}", size=True) as advance:
        images = None
        if weights.image is not None:
            images = Images(Path(weights.image).expanduser(), weights.verify_image, advance)
        return Model.load(
            path,
            context=context,
            progress=advance,
            before=fits,
            reading=Reading(weights.parallel, weights.direct),
            images=images,
            twelve_bits=weights.twelve_bits,
            check=weights.check,
        )


def crash_log(
    config: Config, limits: Any, session: Any = None
) -> tuple[Callable[[Any], None], Callable[[Any], None] | None]:
    """Where each tick's record goes before it is applied (rank 0: to all ranks, too), and where what
    it made this rank do: into the file `engine.journal`, of several ranks each its own."""
    publish = session.record if session is not None and session.rank == 0 else lambda tick: None
    if config.engine.journal is None:
        return publish, None
    from . import __version__
    from .config import digest
    from .engine.journal import JournalError, JournalWriter
    from .engine.records import Settings

    path = config.engine.journal + ("" if session is None else f".rank{session.rank}")
    try:
        writer = JournalWriter(path)
        writer.write(Settings(__version__, limits, {"config": digest(config)}))
    except OSError as error:
        raise StartupError(f"engine.journal {config.engine.journal}: {error.strerror}") from error
    except JournalError as error:
        raise StartupError(f"engine.journal {path}: {error}; move it away, or name another") from error

    def record(tick: Any) -> None:
        writer.write(tick)
        publish(tick)

    return record, writer.write


def check_keys(path: str | None) -> None:
    """Raises StartupError unless a file of API keys can be used, before minutes of loading."""
    from .api.keys import Keys

    try:
        if path is not None:
            Keys.read(path)
    except OSError as error:
        raise StartupError(f"http.api_keys {path}: {error.strerror}") from error
    except ValueError as error:  # not UTF-8, too
        raise StartupError(f"http.api_keys: {error}") from error


def take_port(host: str, port: int) -> socket.socket:
    """A bound socket, so that a taken port is found before minutes of loading; also one that another
    server has taken and does not listen at yet.

    Raises:
      StartupError: the address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        # Whoever binds with this option may share a port until somebody listens. `api.server` sets it again.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError as error:
        sock.close()
        raise StartupError(
            f"http.host {host} http.port {port} cannot be used: {error.strerror}; "
            "choose another with --set http.port=N"
        ) from error
    return sock


@contextlib.contextmanager
def progress(what: str, size: bool = False) -> Iterator[Callable[..., None]]:
    """A progress bar on a terminal, log lines elsewhere: each minute, and at the end.

    Args:
      size: what is counted are bytes: their rate and the time left are shown too.

    Yields a function of (done, in all, detail).
    """
    started = told = time.monotonic()
    if not sys.stderr.isatty():
        most = 0

        def tell(done: int, total: int, detail: str = "") -> None:
            nonlocal told, most
            most, now = max(most, done), time.monotonic()
            if now - told > 60:
                told = now
                log.info("%s: %d %% after %.0f s", what, 100 * done // max(total, 1), now - started)

        yield tell
        seconds = time.monotonic() - started
        rate = f", {most / 2**30:.2f} GiB at {most / 1e9 / seconds:.2f} GB/s" if size else ""
        log.info("%s: %.1f s%s", what, seconds, rate)
        return
    from rich import progress as bars
    from rich.console import Console

    count = (
        (bars.DownloadColumn(), bars.TransferSpeedColumn(), bars.TimeRemainingColumn())
        if size
        else (bars.TextColumn("{task.completed}/{task.total} {task.fields[detail]}"),)
    )
    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        *count,
        bars.TimeElapsedColumn(),
    )
    with bars.Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=None, detail="")
        yield lambda done, total, detail="": bar.update(
            task, completed=done, total=total, detail=detail
        )


def set_up_logging(config: Config) -> None:
    """One line an event on standard error, as text or JSON."""
    from .api.logs import configure

    configure(config.log)


def main() -> None:
    """`python -m sparkjax.serve` is `sparkjax serve`."""
    from .cli import serve_main

    serve_main()


if __name__ == "__main__":
    main()
