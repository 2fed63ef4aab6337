"""A start that does not fit is refused before anything is allocated."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

from sparkjax import config, serve
from sparkjax.engine import budget, memory
from sparkjax.engine.limits import DoesNotFit
from sparkjax.model import Model
from sparkjax.models import cache as caches

GOLDEN = Path(__file__).parents[1] / "golden" / "llama"


@pytest.fixture(scope="module")
def facts() -> tuple:
    """The family, its configuration, the context, and bytes of weights as the headers have them."""
    seen = []
    model = Model.load(GOLDEN, before=lambda *given: seen.append(given))
    (family, values, weights) = seen[0]
    assert sum(weights[0].values()) == sum(a.nbytes for a in jax.tree.leaves(model.params))
    return family, values, model.context, weights


def test_the_table_holds_what_will_be_allocated(facts):
    family, values, context, weights = facts
    table, _ = budget.plan(*facts, slots=3, kv_tokens=200, page_size=16)
    assert table.of("weights") == sum(weights[0].values())
    sizes = caches.Sizes(13, 16, 3)
    declared = family.declare_caches(values, 1)
    assert table.of("caches") == caches.nbytes(declared, sizes, context.dtype)
    assert table.available <= memory.mem_available() + (64 << 20)


def test_ranks_of_one_process_share_a_cpus_memory(facts):
    family, values, context, weights = facts
    one, _ = budget.plan(*facts, slots=3, kv_tokens=64)
    both, _ = budget.plan(family, values, context, {0: weights[0], 1: weights[0]}, slots=3, kv_tokens=64)
    assert both.of("weights") == 2 * one.of("weights")
    assert both.of("caches") == 2 * one.of("caches")


@pytest.mark.parametrize("kv_tokens", [None, 640, 6400])
def test_what_is_said_to_fit_fits_and_a_page_more_does_not(facts, kv_tokens):
    room = (600 << 20) + 5_000_000
    _, tokens = budget.plan(*facts, slots=2, kv_tokens=kv_tokens, page_size=64, room=room)
    assert tokens > 0 and tokens % 64 == 0
    assert budget.plan(*facts, slots=2, kv_tokens=tokens, page_size=64, room=room)[0].free >= 0
    assert budget.plan(*facts, slots=2, kv_tokens=tokens + 1, page_size=64, room=room)[0].free < 0


def test_a_refusal_names_the_largest_items_and_the_largest_pool(facts):
    room = 600 << 20
    _, tokens = budget.plan(*facts, slots=2, room=room)
    with pytest.raises(DoesNotFit) as caught:
        budget.require(*facts, slots=2, kv_tokens=100_000_000, room=room)
    message = str(caught.value)
    assert f"largest engine.kv_tokens that fits is {tokens}" in message
    assert "caches k" in message and "0.59 GiB are free" in message
    with pytest.raises(DoesNotFit, match=r"with any engine\.kv_tokens"):
        budget.require(*facts, slots=2, kv_tokens=64, room=1 << 20)


def test_a_server_refuses_before_it_reads(monkeypatch):
    """No parameter has been allocated when the refusal comes."""
    from sparkjax.weights import stream

    monkeypatch.setattr(stream, "to_host", lambda *_: pytest.fail("weights were read"))
    text = [f"model.path={GOLDEN}", "engine.kv_tokens=1000000000000", "engine.compilation_cache=null"]
    loaded = config.load(None, environ={}, overrides=text)
    with pytest.raises(serve.StartupError, match=r"largest engine\.kv_tokens that fits is"):
        serve.start(loaded)
