"""`sparkjax pull`: options to calls of `sparkjax.fetch`, and a progress bar."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any


def pull(
    name: str,
    revision: str | None,
    folder: Path,
    origin: str | None,
    key_file: Path | None,
    share_of: tuple[int, int] | None,
    offline: bool,
) -> Any:
    """Fetches; arguments as of the verb. Returns a `sparkjax.fetch.pull.Pulled`."""
    from sparkjax.fetch import hub
    from sparkjax.fetch.errors import FetchError
    from sparkjax.fetch.pull import pull as fetch
    from sparkjax.fetch.source import named
    from sparkjax.fetch.store import Store

    from .client import read_key

    if share_of is not None and share_of[0] >= share_of[1]:
        raise FetchError(f"--rank is {share_of[0]}; allowed: below --ranks, which is {share_of[1]}")
    source = named(name)
    if revision is not None:
        source = dataclasses.replace(source, revision=revision)
    where = None
    if origin is not None:
        # The hub's token is none of the other box's business.
        where = hub.Hub(hub.box(origin), read_key(key_file) if key_file else False)
    store = Store(folder.expanduser())
    with _bar(str(source)) as progress:
        return fetch(
            source, store, where, share=share_of, offline=offline, progress=progress
        )


def share(folder: Path, host: str, port: int, key_file: Path | None) -> None:
    """Shares a folder until it is stopped."""
    from sparkjax.fetch.share import serve
    from sparkjax.fetch.store import Store

    from .client import read_key

    serve(Store(folder.expanduser()), host, port, (read_key(key_file),) if key_file else ())


class _bar:
    """A progress bar on a terminal, nothing elsewhere."""

    def __init__(self, title: str):
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), DownloadColumn(True),
            TransferSpeedColumn(), TimeRemainingColumn(), TextColumn("{task.fields[name]}"),
            console=console, disable=not console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task(title, total=None, name="")

    def __enter__(self) -> Any:
        self._bar.start()
        return self._moved

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def _moved(self, done: int, total: int, name: str) -> None:
        self._bar.update(self._task, completed=done, total=total, name=name)
