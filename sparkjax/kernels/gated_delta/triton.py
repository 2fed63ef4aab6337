"""The gated delta rule on a GPU, with one decay a head or one a key channel (Kimi delta attention).

A block of threads owns some value columns of one head's state and walks over the row's tokens
with them in registers; states are read from and written to the stacked plane in place.

Up to `RECURRENT` tokens a row go one by one. Longer rows go in chunks of 16 by the formulas of
`reference.chunked`, but for the last tokens, whose states are all kept: they go one by one again.
The unit triangular system is inverted by forward substitution. Decays between a chunk's tokens are
split at the chunk's middle, exp(G_i - G_j) = exp(G_i - G_m) exp(G_m - G_j), which turns them into
matrix products (Yang et al. 2024, "Gated Linear Attention Transformers"); where a channel decays
so fast that a factor might overflow, the chunk takes the pairs one by one instead.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .. import pallas as tools
from .reference import EPS, RECURRENT

CHUNK = 16
SPAN = 75.0
"""How much a channel's log decay may sum to in one chunk's half before factors may overflow."""


def supports(q: Any, v: Any, g: Any, plane: Any) -> str | None:
    """None if `gated_delta` can take these, else the reason."""
    if reason := tools.types(q=q, v=v):
        return reason
    if plane.dtype != jnp.float32:
        return f"states are {plane.dtype}; float32 is supported"
    for name, size in (("key", q.shape[-1]), ("value", v.shape[-1])):
        if size < 16 or size & (size - 1):
            return f"{size} channels a {name} head; powers of two from 16 are supported"
    if v.shape[2] % q.shape[2] or g.shape[2] != v.shape[2]:
        return f"heads do not fit: q {q.shape}, v {v.shape}, g {g.shape}"
    return None


def gated_delta(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    plane: jax.Array,
    layer: Any,
    slots: jax.Array,
    start: jax.Array,
    lengths: jax.Array,
    *,
    columns: int | None = None,
    warps: int | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Outputs and the plane with the new states; arguments as in `reference.gated_delta_cached`.

    Args:
      g: [B, Q, Hv], or [B, Q, Hv, Dk] for decays per key channel.
      columns, warps: value channels and warps a block of threads (measured defaults).
    """
    b, count, heads, dim_v = v.shape
    step = count <= RECURRENT
    columns = min(columns or 32, dim_v)
    body = functools.partial(
        _kernel, chunked=not step, columns=columns, precision=tools.precision(v.dtype, interpret)
    )
    run = tools.call(
        body,
        (dim_v // columns, heads, b),
        (
            jax.ShapeDtypeStruct(v.shape, v.dtype),
            jax.ShapeDtypeStruct(plane.shape, plane.dtype),
        ),
        warps=warps or 4,
        aliases={9: 1},
        interpret=interpret,
        name="delta_step" if step else "delta_chunks",
    )
    ints = (tools.scalar(layer), *(x.astype(jnp.int32) for x in (slots, start, lengths)))
    return run(*ints, q, k, v, g.astype(jnp.float32), beta.astype(jnp.float32), plane)


def _kernel(
    layer_ref: Any,
    slots_ref: Any,
    start_ref: Any,
    lengths_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    g_ref: Any,
    beta_ref: Any,
    plane_ref: Any,
    out_ref: Any,
    kept_ref: Any,
    *,
    chunked: bool,
    columns: int,
    precision: Any,
) -> None:
    column, h, b = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    _, count, key_heads, dim = q_ref.shape
    places = plane_ref.shape[2]
    per_channel = len(g_ref.shape) == 4
    layer, slot, start, length = layer_ref[0], slots_ref[b], start_ref[b], lengths_ref[b]
    key_head = h // (v_ref.shape[2] // key_heads)
    cut = pl.ds(column * columns, columns)
    tile = (dim, columns)

    def place(position: jax.Array) -> jax.Array:
        return jax.lax.rem(position, jnp.int32(places))

    def store(state: jax.Array, position: jax.Array) -> None:
        kept_ref[layer, slot, place(position), h, :, cut] = state

    def token(t: jax.Array, state: jax.Array) -> jax.Array:
        q, k = (_unit(ref[b, t, key_head, :].astype(jnp.float32)) for ref in (q_ref, k_ref))
        v = v_ref[b, t, h, cut].astype(jnp.float32)
        decay = jnp.exp(g_ref[b, t, h, :] if per_channel else g_ref[b, t, h])
        state = state * (decay[:, None] if per_channel else decay)
        u = beta_ref[b, t, h] * (v - jnp.sum(state * k[:, None], axis=0))
        state = state + k[:, None] * u[None, :]
        out = jnp.sum(state * (q * dim**-0.5)[:, None], axis=0)
        out_ref[b, t, h, cut] = out.astype(out_ref.dtype)

        @pl.when(t >= length - places)
        def keep() -> None:
            store(state, start + t)

        return state

    @pl.when(length > 0)
    def walk() -> None:
        # A row that starts its sequence has no place in front of it; any address will do.
        before = place(jnp.maximum(start - 1, 0))
        state = kept_ref[layer, slot, before, h, :, cut]
        state = jnp.where(start == 0, jnp.zeros(tile, jnp.float32), state)
        front = jnp.int32(0)
        if chunked:
            front = jnp.maximum(length - (places - 1), 0)
            chunk = functools.partial(
                _chunk,
                q_ref,
                k_ref,
                v_ref,
                g_ref,
                beta_ref,
                out_ref,
                b,
                h,
                key_head,
                cut,
                front,
                precision,
            )
            state = jax.lax.fori_loop(0, pl.cdiv(front, CHUNK), chunk, state)

            @pl.when(front > 0)
            def keep() -> None:
                store(state, start + front - 1)

        jax.lax.fori_loop(front, length, token, state)

    def clear(t: jax.Array, nothing: jax.Array) -> jax.Array:
        out_ref[b, t, h, cut] = jnp.zeros((columns,), out_ref.dtype)
        return nothing

    jax.lax.fori_loop(length, count, clear, jnp.int32(0))


def _unit(x: jax.Array) -> jax.Array:
    """x / sqrt(sum x^2 + 1e-6) over the last axis."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + EPS)


def _row(x: jax.Array, index: jax.Array | int) -> jax.Array:
    """Row `index` of x [C, ...], which is in registers."""
    rows = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
    return jnp.sum(jnp.where(rows == index, x, 0.0), axis=0)


def _chunk(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    g_ref: Any,
    beta_ref: Any,
    out_ref: Any,
    b: Any,
    h: Any,
    key_head: Any,
    cut: Any,
    front: jax.Array,
    precision: Any,
    number: jax.Array,
    state: jax.Array,
) -> jax.Array:
    """The state after one chunk of tokens below `front`, whose outputs are written."""
    dim = q_ref.shape[-1]
    per_channel = len(g_ref.shape) == 4
    tokens = pl.ds(number * CHUNK, CHUNK)
    real = number * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32) < front
    load = functools.partial(tools.plgpu.load, other=0.0)
    q = _unit(load(q_ref.at[b, tokens, key_head, :], mask=real[:, None]).astype(jnp.float32))
    k = _unit(load(k_ref.at[b, tokens, key_head, :], mask=real[:, None]).astype(jnp.float32))
    q = q * dim**-0.5
    v = load(v_ref.at[b, tokens, h, cut], mask=real[:, None]).astype(jnp.float32)
    beta = load(beta_ref.at[b, tokens, h], mask=real)
    if per_channel:
        total = jnp.cumsum(load(g_ref.at[b, tokens, h, :], mask=real[:, None]), axis=0)
        pairs = _channel_pairs(q, k, total, precision)
        end = _row(total, CHUNK - 1)
    else:
        total = jnp.cumsum(load(g_ref.at[b, tokens, h], mask=real), axis=0)[:, None]
        pairs = _head_pairs(q, k, total, precision)
        end = jnp.sum(_row(total, CHUNK - 1))
    rows = jax.lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), 0)
    cols = jax.lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), 1)
    system = jnp.where(cols < rows, pairs[0] * beta[:, None], 0.0)
    inside = jnp.where(cols <= rows, pairs[1], 0.0)
    into = jnp.exp(total)
    right = beta[:, None] * (v - tools.dot(k * into, state, precision))
    u = tools.dot(_inverse(system), right, precision)
    out = tools.dot(q * into, state, precision) + tools.dot(inside, u, precision)
    tools.plgpu.store(out_ref.at[b, tokens, h, cut], out.astype(out_ref.dtype), mask=real[:, None])
    left = k * jnp.exp((end[None, :] if per_channel else end) - total)
    decay = jnp.exp(end)
    state = state * (decay[:, None] if per_channel else decay)
    return state + tools.dot(left.T, u, precision)


def _head_pairs(
    q: jax.Array, k: jax.Array, total: jax.Array, precision: Any
) -> tuple[jax.Array, jax.Array]:
    """exp(G_i - G_j) k_i . k_j and the same of q_i, [C, C], right where j <= i."""
    decay = jnp.exp(jnp.minimum(total - total.reshape(1, CHUNK), 0.0))
    return tools.dot(k, k.T, precision) * decay, tools.dot(q, k.T, precision) * decay


def _channel_pairs(
    q: jax.Array, k: jax.Array, total: jax.Array, precision: Any
) -> tuple[jax.Array, jax.Array]:
    """sum_d exp(G_id - G_jd) k_id k_jd and the same of q_i, [C, C], right where j <= i."""
    middle = _row(total, CHUNK // 2 - 1)
    end = _row(total, CHUNK - 1)

    def factored() -> tuple[jax.Array, jax.Array]:
        up, down = jnp.exp(total - middle[None, :]), jnp.exp(middle[None, :] - total)
        keys = (k * down).T
        return tools.dot(k * up, keys, precision), tools.dot(q * up, keys, precision)

    def singly() -> tuple[jax.Array, jax.Array]:
        cols = jax.lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), 1)

        def column(j: jax.Array, found: tuple[jax.Array, jax.Array]) -> tuple:
            to = jnp.exp(jnp.minimum(total - _row(total, j)[None, :], 0.0)) * _row(k, j)[None, :]
            return tuple(
                jnp.where(cols == j, jnp.sum(x * to, axis=1)[:, None], old)
                for x, old in zip((k, q), found, strict=True)
            )

        nothing = jnp.zeros((CHUNK, CHUNK), jnp.float32)
        return jax.lax.fori_loop(0, CHUNK, column, (nothing, nothing))

    slow = jnp.max(jnp.maximum(-middle, middle - end)) < SPAN
    return jax.lax.cond(slow, factored, singly)


def _inverse(system: jax.Array) -> jax.Array:
    """(I + A)^-1 of strictly lower triangular A [C, C], row by row."""
    rows = jax.lax.broadcasted_iota(jnp.int32, system.shape, 0)
    cols = jax.lax.broadcasted_iota(jnp.int32, system.shape, 1)

    def solve(i: jax.Array, found: jax.Array) -> jax.Array:
        # Row i of the inverse is e_i - sum_j A_ij (row j).
        line = _row(system, i)
        new = jnp.sum(line[:, None] * found, axis=0)
        return jnp.where(rows == i, found - new[None, :], found)

    return jax.lax.fori_loop(1, CHUNK, solve, jnp.where(rows == cols, 1.0, 0.0))
