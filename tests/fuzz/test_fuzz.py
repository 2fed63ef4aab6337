"""A few inputs to every surface; `make fuzz` tries many."""

from __future__ import annotations

import random

import pytest

from . import bodies, grammars, texts, wire

SURFACES = {
    texts.parsers: 60,
    texts.answers: 20,
    texts.values: 200,
    bodies.bodies: 60,
    grammars.grammars: 20,
    wire.connections: 20,
}


@pytest.mark.parametrize("surface", SURFACES, ids=lambda surface: surface.__name__)
def test_random_inputs_find_nothing(surface):
    with surface() as check:
        for number in range(SURFACES[surface]):
            check(random.Random(f"default.{surface.__name__}.{number}"))
