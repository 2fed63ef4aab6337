"""Compiled programs of a rank hold no collectives but ours, one after another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparkjax.engine.engine import Engine
from sparkjax.engine.limits import make_limits
from sparkjax.mesh import spmd
from sparkjax.mesh.context import RANKS, Context
from sparkjax.mesh.transports import order
from sparkjax.mesh.transports.shm import Shm
from sparkjax.model import Model

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
BY_DEFAULT = ("llama",)


@pytest.fixture(autouse=True)
def quick_compile() -> Iterator[None]:
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def text(function, *arguments) -> str:
    return jax.jit(function).lower(*arguments).compile().as_text()


def test_what_may_run_in_any_order_is_found():
    context = Context(ranks=2, transport=Shm(0, 2, 0))
    x = jnp.ones((8, 8))

    def chained(x):
        return context.all_reduce(context.all_reduce(x) * 2)

    def beside(x):
        return context.all_reduce(jnp.sin(x)) + context.all_reduce(jnp.cos(x))

    def branches(x, choose):
        y = jax.lax.cond(choose > 0, context.all_reduce, lambda x: x, x)
        z = jax.lax.cond(choose > 1, context.all_reduce, lambda x: x, x * 2)
        return y, z

    def loop(x):
        return context.all_reduce(jax.lax.fori_loop(0, 3, lambda i, x: context.all_reduce(x), x))

    assert order.count(text(chained, x)) == 2
    assert order.problems(text(chained, x)) == []
    assert order.problems(text(loop, x)) == []
    assert len(order.problems(text(beside, x))) == 1
    assert len(order.problems(text(branches, x, jnp.int32(1)))) == 1


def test_collectives_of_xla_are_found():
    mesh = spmd.make_mesh(2)
    spread = spmd.spmd(lambda x: jax.lax.psum(x, RANKS), mesh, jax.P(RANKS), jax.P())
    assert any("all-reduce" in line for line in order.problems(text(spread, np.ones((2, 4)))))


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(p.name, marks=() if p.name in BY_DEFAULT else pytest.mark.slow)
        for p in sorted(GOLDEN.iterdir())
        if (p / "config.json").exists()
    ],
)
def test_the_programs_of_a_rank_are_in_order(family: str):
    context = Context(ranks=2, transport=Shm(1, 2, 0), platform="cpu")
    model = Model.load(GOLDEN / family, context=context)
    limits = make_limits(model, slots=2, context=64, tiles=(model.page,), kv_tokens=2 * model.page)
    runner = Engine(model, limits).runner
    texts: dict[str, str] = {}

    def read(name, program):
        def call(*arguments):
            texts[name] = program.lower(*arguments).compile().as_text()
            shapes = jax.eval_shape(program, *arguments)
            return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

        return call

    for name in ("tile", "advance", "choose"):
        setattr(runner.programs, name, read(name, getattr(runner.programs, name)))
    runner.warm()
    assert set(texts) == {"tile", "advance", "choose"}
    for name, program in texts.items():
        assert order.count(program) >= 1, name
        assert order.problems(program) == [], name
