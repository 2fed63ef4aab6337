"""Launches and collectives read off optimised HLO."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from sparkjax.mesh import spmd
from sparkjax.mesh.context import RANKS
from sparkjax.plan import hlo

P = jax.sharding.PartitionSpec


def test_loops_count_by_their_trips_and_collectives_by_size():
    mesh = spmd.make_mesh(2)

    def inside(x):
        def body(c, _):
            return jax.lax.psum(jnp.sin(c) @ c.T, RANKS)[:, : c.shape[1]], None

        return jax.lax.scan(body, x, None, length=7)[0]

    step = spmd.spmd(inside, mesh, (P(),), P())
    text = jax.jit(step).lower(jnp.ones((64, 64))).compile().as_text()
    counts = hlo.count(text)
    assert counts.collectives == {("all-reduce", 64 * 64 * 4): 7}
    assert counts.total >= 7 * 2 and counts.host_calls == 0 and counts.unknown_trips == 0


def test_a_host_callback_is_seen():
    def step(x):
        jax.debug.callback(lambda v: None, x.sum())
        return x * 2

    text = jax.jit(step).lower(jnp.ones(8)).compile().as_text()
    assert hlo.count(text).host_calls == 1


def test_of_a_conditional_the_branch_that_is_asked_for_counts():
    def step(p, x):
        return jax.lax.cond(p, lambda v: jnp.sort(jnp.sin(v) @ v), lambda v: v, x)

    text = jax.jit(step).lower(True, jnp.ones((32, 32))).compile().as_text()
    assert hlo.count(text, max).total > hlo.count(text, min).total


def test_text_without_an_entry_is_refused():
    with pytest.raises(ValueError, match="ENTRY"):
        hlo.count("HloModule nothing")
