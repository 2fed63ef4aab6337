"""How the model tests are compiled."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def quick_compile(request: pytest.FixtureRequest) -> Iterator[None]:
    """Programs that run a few times on a tiny model are compiled without most optimisations, in
    half the time. Tests marked slow compile as production does."""
    quick = request.node.get_closest_marker("slow") is None
    jax.config.update("jax_disable_most_optimizations", quick)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
