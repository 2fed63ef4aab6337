"""The jnp reference of Kimi delta attention (Kimi team 2025, "Kimi Linear").

Per head, with decay exp(g_t) per key channel and write strength beta_t:

    S <- diag(exp(g_t)) S
    u_t = beta_t (v_t - S^T k_t)        # what the state does not already predict
    S <- S + k_t u_t^T
    o_t = S^T q_t

`recurrent` is this loop. `chunked` is the same over chunks of C tokens: the corrections of a
chunk solve a unit lower triangular system,

    (I + A) u = beta v - (beta k exp(G)) S0,
    A_ij = beta_i sum_d k_id k_jd exp(G_id - G_jd)  for j < i,

with G the decays summed from the chunk's start, and then
o_i = (q_i exp(G_i)) S0 + sum_{j <= i} (sum_d q_id k_jd exp(G_id - G_jd)) u_j.
Exponents are never positive, so nothing overflows however fast a channel decays.

Both take g = 0 and beta = 0 for a token that is not there: the state passes it unchanged.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from .. import states

EPS = 1e-6
CHUNK = 16
"""The decays between all pairs of a chunk's tokens are held per channel: C x C x D a head."""
RECURRENT = 16
"""Up to so many tokens a row go one by one: decode, and verification of drafts, whose numbers
must not depend on how many tokens are verified at once."""

_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def unit(x: jax.Array) -> jax.Array:
    """x / sqrt(sum x^2 + 1e-6) over the last axis, float32."""
    x = x.astype(jnp.float32)
    return x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True) + EPS)


def _queries(q: jax.Array) -> jax.Array:
    return unit(q) * q.shape[-1] ** -0.5


def recurrent(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    every: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One token at a time.

    Args:
      q, k: [B, Q, heads, Dk], not yet normalised.
      v: [B, Q, heads, Dv].
      g: float32 [B, Q, heads, Dk], the logarithm of the decay (<= 0).
      beta: float32 [B, Q, heads], the write strength.
      state: float32 [B, heads, Dk, Dv].
      every: return the states after all tokens in place of u.

    Returns:
      outputs [B, Q, heads, Dv] in v's dtype, corrections u float32 [B, Q, heads, Dv] (or states
      [B, Q, heads, Dk, Dv]), and the state after the last token.
    """
    dtype = v.dtype

    def step(s: jax.Array, token: tuple) -> tuple[jax.Array, tuple]:
        q, k, v, g, beta = token
        s = s * jnp.exp(g)[..., None]
        u = beta[..., None] * (v - jnp.sum(s * k[..., None], axis=-2))
        s = s + k[..., None] * u[..., None, :]
        return s, (jnp.sum(s * q[..., None], axis=-2), s if every else u)

    row = (_queries(q), unit(k), v.astype(jnp.float32), g, beta)
    tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), row)
    state, (out, kept) = jax.lax.scan(step, state, tokens)
    return jnp.moveaxis(out, 0, 1).astype(dtype), jnp.moveaxis(kept, 0, 1), state


def chunked(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    chunk: int = CHUNK,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The same as `recurrent`, `chunk` tokens at a time."""
    b, count, heads, dim_v = v.shape
    dtype = v.dtype
    chunks = -(-count // chunk)

    def cut(x: jax.Array) -> jax.Array:
        """[B, Q, heads, ...] -> [chunks, B, heads, C, ...]"""
        padding = [(0, 0)] * x.ndim
        padding[1] = (0, chunks * chunk - count)
        x = jnp.pad(x.astype(jnp.float32), padding)
        return jnp.moveaxis(x.reshape(b, chunks, chunk, *x.shape[2:]), (1, 3), (0, 2))

    lower = jnp.tril(jnp.ones((chunk, chunk), bool))
    strict = jnp.tril(jnp.ones((chunk, chunk), bool), -1)

    def step(s: jax.Array, one: tuple) -> tuple[jax.Array, tuple]:
        q, k, v, g, beta = one
        into = jnp.exp(jnp.cumsum(g, axis=-2))
        # G_i - G_j summed directly: a difference of two long sums would lose its digits.
        spans = jnp.cumsum(jnp.where(strict[..., None], g[..., :, None, :], 0.0), axis=-3)
        # [B, heads, i, j, D]: from token j to token i.
        decay = jnp.where(lower[..., None], jnp.exp(spans), 0.0)
        system = beta[..., None] * _einsum("bhid,bhjd,bhijd->bhij", k, k, decay)
        right = beta[..., None] * (v - _einsum("bhid,bhde->bhie", k * into, s))
        u = jax.scipy.linalg.solve_triangular(
            jnp.where(strict, system, 0.0), right, lower=True, unit_diagonal=True
        )
        inside = _einsum("bhid,bhjd,bhijd->bhij", q, k, decay)
        out = _einsum("bhid,bhde->bhie", q * into, s) + _einsum("bhij,bhje->bhie", inside, u)
        s = s * into[..., -1, :, None] + _einsum("bhid,bhie->bhde", k * decay[..., -1, :, :], u)
        return s, (out, u)

    row = (_queries(q), unit(k), v, g, beta)
    state, found = jax.lax.scan(step, state, jax.tree.map(cut, row))

    def join(x: jax.Array) -> jax.Array:
        """[chunks, B, heads, C, Dv] -> [B, Q, heads, Dv]"""
        x = jnp.moveaxis(x, (0, 2), (1, 3))
        return x.reshape(b, chunks * chunk, heads, dim_v)[:, :count]

    out, u = found
    return join(out).astype(dtype), join(u), state


def last_states(
    k: jax.Array, u: jax.Array, g: jax.Array, state: jax.Array, lengths: jax.Array, count: int
) -> tuple[jax.Array, jax.Array]:
    """The states after each row's last `count` real tokens (all of them, where there are fewer).

    S after n tokens is diag(exp(G_n)) S0 + sum_{i < n} (exp(G_n - G_i) k_i) u_i^T, one product
    over the row; the rest follow one by one.

    Args:
      k: [B, Q, heads, Dk], not yet normalised.
      u: the corrections that `chunked` returned.
      state: before the row's first token.
      lengths: int32 [B], real tokens a row; g and u are 0 behind them.

    Returns:
      float32 [B, count, heads, Dk, Dv], and int32 [B, count]: after which token of the row (0 ..
      Q - 1), or Q where there is none.
    """
    b, q = k.shape[:2]
    keys = unit(k)
    front = jnp.maximum(lengths - count, 0)
    before = (jnp.arange(q) < front[:, None])[..., None, None]
    early = jnp.where(before, g, 0.0)
    # Summed from the far end, so that the recent (small) sums are exact.
    left = jnp.cumsum(early[:, ::-1], axis=1)[:, ::-1]
    after = jnp.concatenate([left[:, 1:], jnp.zeros_like(left[:, :1])], axis=1)
    weighted = jnp.where(before, keys * jnp.exp(after), 0.0)
    start = state * jnp.exp(left[:, 0])[..., None] + _einsum("bqhd,bqhe->bhde", weighted, u)
    index = front[:, None] + jnp.arange(count)
    real = index < lengths[:, None]
    index = jnp.where(real, index, 0)

    def take(x: jax.Array) -> jax.Array:
        shape = (b, count, *(1,) * (x.ndim - 2))
        taken = jnp.take_along_axis(x, index.reshape(shape), axis=1)
        return jnp.where(real.reshape(shape), taken, 0.0)

    def step(s: jax.Array, token: tuple) -> tuple[jax.Array, jax.Array]:
        k, u, g = token
        s = s * jnp.exp(g)[..., None] + k[..., None] * u[..., None, :]
        return s, s

    tokens = jax.tree.map(lambda x: jnp.moveaxis(take(x), 1, 0), (keys, u, g))
    states = jnp.moveaxis(jax.lax.scan(step, start, tokens)[1], 0, 1)
    return states, jnp.where(real, index, q)


def kda(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    lengths: jax.Array,
    keep: int = 1,
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, jax.Array] | None]:
    """The rule over a row of tokens, and the states that a roll-back may return to.

    Args:
      q, k, v, g, beta, state: as in `recurrent`; g and beta are ignored for tokens at or past
        `lengths` (int32 [B]).
      keep: how many of the last states are wanted; 1: only the last.

    Returns:
      outputs [B, Q, heads, Dv], the state after each row's last real token, and for keep > 1 the
      last states and after which token each stands, as `last_states` returns them.
    """
    count = q.shape[1]
    real = (jnp.arange(count) < lengths[:, None])[..., None]
    g, beta = jnp.where(real[..., None], g, 0.0), jnp.where(real, beta, 0.0)
    if count <= RECURRENT:
        out, kept, last = recurrent(q, k, v, g, beta, state, every=keep > 1)
        if keep == 1:
            return out, last, None
        index = jnp.arange(count)
        wanted = (index < lengths[:, None]) & (index >= lengths[:, None] - keep)
        return out, last, (kept, jnp.where(wanted, index, count))
    out, u, last = chunked(q, k, v, g, beta, state)
    if keep == 1:
        return out, last, None
    return out, last, last_states(k, u, g, state, lengths, keep)


def kda_cached(
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
) -> tuple[jax.Array, jax.Array]:
    """The rule over a row of tokens whose states live in a plane (see `kernels.states`).

    Args:
      q, k, v, g, beta, lengths: as in `kda`.
      plane: float32 [L, slots, n, heads, Dk, Dv], the states of all layers.
      layer: int or int32 [], which of them.
      slots, start: int32 [B], where each row's states live, and the position of its first token.

    Returns:
      outputs [B, Q, heads, Dv] (arbitrary behind `lengths`), and the plane with the states after
      each row's last n tokens.
    """
    return states.through(kda, (q, k, v, g, beta), plane, layer, slots, start, lengths)
