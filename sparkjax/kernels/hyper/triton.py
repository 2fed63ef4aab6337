"""A hyper-connection site's coefficients on a GPU in two launches, where XLA makes some 80.

The first multiplies a tile of tokens by `fn`, cut along its inputs over many blocks of threads; the
second adds the parts in their order and normalises one token's coefficients in registers.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ...weights import formats
from .. import pallas as tools
from ..pallas import plgpu
from . import reference

TOKENS = 16
INPUTS = 64
"""Inputs of a step, `STEPS` of which a block of threads takes."""
STEPS = 4


def supports(streams: Any, fn: Any) -> str | None:
    """None if `coefficients` can take these, else the reason."""
    n, hidden = streams.shape[-2:]
    if formats.is_quantized(fn):
        return "a quantized fn"
    if reason := tools.types(streams=streams, fn=fn):
        return reason
    if n & (n - 1):
        return f"{n} streams; a power of two is supported"
    if n * hidden % INPUTS:
        return f"{n} streams of {hidden} channels; a multiple of {INPUTS} together is supported"
    return None


def coefficients(
    streams: jax.Array,
    fn: jax.Array,
    base: jax.Array,
    scale: jax.Array,
    layer: Any,
    *,
    rounds: int,
    eps: float,
    norm_eps: float,
    interpret: bool = False,
) -> reference.Coefficients:
    """See `reference.coefficients`. A token's bits depend on nothing but the token."""
    n = streams.shape[-2]
    x = streams.reshape(-1, n * streams.shape[-1])
    count, inputs = x.shape
    parts, width = -(-inputs // (INPUTS * STEPS)), tools.power(fn.shape[-2], 16)
    member = tools.scalar(layer)
    precision = tools.precision(jnp.float32, interpret)
    sums = tools.call(
        functools.partial(_multiply, precision=precision),
        (-(-count // TOKENS), parts),
        (
            jax.ShapeDtypeStruct((count, parts, width), jnp.float32),
            jax.ShapeDtypeStruct((count, parts), jnp.float32),
        ),
        stages=3,
        interpret=interpret,
        name="hyper_multiply",
    )(member, x, fn)
    form = functools.partial(_finish, inputs=inputs, rounds=rounds, eps=eps, norm_eps=norm_eps)
    shapes = [(count, n), (count, n), (count, n, n)]
    found = tools.call(
        form,
        (count,),
        tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes),
        warps=1,
        interpret=interpret,
        name="hyper_finish",
    )(member, *sums, base.astype(jnp.float32), scale.astype(jnp.float32))
    lead = streams.shape[:-2]
    pre, post, mix = (a.reshape(*lead, *a.shape[1:]) for a in found)
    return pre, post, mix


def _multiply(
    member_ref: Any, x_ref: Any, fn_ref: Any, sums_ref: Any, squares_ref: Any, *, precision: Any
) -> None:
    """One part of fn x and of the sum of squares, for a tile of tokens."""
    number, part = pl.program_id(0), pl.program_id(1)
    count, inputs = x_ref.shape
    outputs, width = fn_ref.shape[1], sums_ref.shape[2]
    layer = member_ref[0]
    token = number * TOKENS + jnp.arange(TOKENS, dtype=jnp.int32)
    there = jnp.broadcast_to((token < count)[:, None], (TOKENS, INPUTS))
    output = jnp.arange(width, dtype=jnp.int32)
    held = jnp.broadcast_to((output < outputs)[:, None], (width, INPUTS))

    def step(index: jax.Array, found: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        sums, squares = found
        column = (index * INPUTS + jnp.arange(INPUTS, dtype=jnp.int32))[None, :]
        row = jnp.minimum(token, count - 1)[:, None]
        x = plgpu.load(x_ref.at[row, column], mask=there, other=0.0).astype(jnp.float32)
        row = jnp.minimum(output, outputs - 1)[:, None]
        w = plgpu.load(fn_ref.at[layer, row, column], mask=held, other=0.0).astype(jnp.float32)
        return sums + tools.dot(x, w.T, precision), squares + jnp.sum(x * x, axis=1)

    first = part * STEPS
    last = jnp.minimum(first + STEPS, inputs // INPUTS)
    nothing = jnp.zeros((TOKENS, width), jnp.float32), jnp.zeros((TOKENS,), jnp.float32)
    sums, squares = lax.fori_loop(first, last, step, nothing)
    # Tokens that are not there are out of range, so not written.
    at = jnp.where(token < count, token, count)
    place = (at[:, None], jnp.full((TOKENS, 1), part, jnp.int32), output[None, :])
    index = tuple(jnp.broadcast_to(i, sums.shape) for i in place)
    plgpu.store(
        sums_ref.at[index], sums, mask=jnp.broadcast_to((token < count)[:, None], sums.shape)
    )
    plgpu.store(
        squares_ref.at[at, jnp.full((TOKENS,), part, jnp.int32)], squares, mask=token < count
    )


def _finish(
    member_ref: Any,
    sums_ref: Any,
    squares_ref: Any,
    base_ref: Any,
    scale_ref: Any,
    pre_ref: Any,
    post_ref: Any,
    mix_ref: Any,
    *,
    inputs: int,
    rounds: int,
    eps: float,
    norm_eps: float,
) -> None:
    """The coefficients of one token."""
    token, layer = pl.program_id(0), member_ref[0]
    parts, n = sums_ref.shape[1], pre_ref.shape[1]
    part = jnp.arange(tools.power(parts), dtype=jnp.int32)
    near, real = jnp.minimum(part, parts - 1), part < parts

    squares = plgpu.load(squares_ref.at[token, near], mask=real, other=0.0)
    shrink = lax.rsqrt(jnp.sum(squares) / inputs + norm_eps)

    def logits(output: jax.Array, kind: int) -> jax.Array:
        """Those of outputs [...], an array of indices."""
        shape = (*part.shape, *output.shape)
        lead = (slice(None),) + (None,) * output.ndim
        values = plgpu.load(
            sums_ref.at[
                token, jnp.broadcast_to(near[lead], shape), jnp.broadcast_to(output[None], shape)
            ],
            mask=jnp.broadcast_to(real[lead], shape),
            other=0.0,
        )
        m = jnp.sum(values, axis=0) * shrink
        return m * scale_ref[layer, kind] + plgpu.load(base_ref.at[layer, output])

    place = jnp.arange(n, dtype=jnp.int32)
    pre_ref[token, :] = 1.0 / (1.0 + jnp.exp(-logits(place, 0))) + eps
    post_ref[token, :] = 2.0 / (1.0 + jnp.exp(-logits(n + place, 1)))
    mix = logits(2 * n + n * place[:, None] + place[None, :], 2)
    mix = jnp.exp(mix - mix.max(-1, keepdims=True))
    mix_ref[token, :, :] = reference.normalised(mix / mix.sum(-1, keepdims=True), rounds, eps)
