"""A hub and a store for the tests that pull; each module's `server` publishes what it needs."""

from __future__ import annotations

from pathlib import Path

import pytest
from hub_server import Running

from sparkjax.fetch.store import Store


@pytest.fixture
def hub(server: Running) -> Running:
    server.faults.reset()
    return server


@pytest.fixture
def here(tmp_path: Path) -> Store:
    return Store(tmp_path / "here")
