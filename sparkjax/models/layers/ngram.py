"""N-gram memory (per-layer embedding): rows of a hashed table, gated into every residual stream.

Hashing, on the host, in int64 (`hash_rows`): with y_0 = the token x_t and y_s = x_{t-s} unless the
sequence starts or an end token stands among x_{t-s} .. x_{t-1}, in which case y_s = the end token,

    mix_n = xor_{s < n} y_s * m_s,     row = mix_n mod P_head + offset_head

for n = 2 .. `size`, `heads` heads each, every head with a prime P of its own. The rows of a token
are joined to e. On the device (`ngram_memory`), for streams R_1 .. R_N,

    k = norm(W_k e) [N, H],  v = W_v e [H],  q = norm(R)         # norms per stream
    a_i = <k_i, q_i> / sqrt(H),  a_i = sign(a_i) sqrt(max(|a_i|, 1e-6))
    u_i = sigmoid(a_i) v
    out = u + silu(conv(norm(u)))          # depthwise, dilation `size`
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...kernels.linear import linear_group
from ...mesh.context import Context
from .. import cache as caches
from ..batch import Batch
from ..params import Dim, Param
from ..tables import Table
from .gated_residual import stream_norm
from .short_conv import declare_conv, declare_tail, short_conv

MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15


@dataclasses.dataclass(frozen=True)
class NGram:
    """Shapes and hashing of the n-gram memories of a model.

    Attributes:
      size: the longest n-gram.
      heads: hashes of every length.
      width: channels of a token's rows together.
      base: the least number of rows of a head.
      divisor: the whole table is padded to a multiple of this.
      vocab, seed: what the multipliers are drawn from.
      end: the token that n-grams do not cross.
      taps: of the convolution.
    """

    size: int
    heads: int
    width: int
    base: int
    divisor: int
    vocab: int
    seed: int
    end: int
    taps: int

    @property
    def all_heads(self) -> int:
        return (self.size - 1) * self.heads

    @property
    def row(self) -> int:
        return self.width // self.all_heads

    def primes(self, which: int) -> np.ndarray:
        """int64 [all_heads]: rows of each head of memory number `which`: successive primes from
        `base` on, numbered on across memories."""
        return np.array(
            primes_from(self.base, (which + 1) * self.all_heads)[-self.all_heads :], np.int64
        )

    def offsets(self, which: int) -> np.ndarray:
        """int64 [all_heads]: each head's first row."""
        return np.concatenate([[0], np.cumsum(self.primes(which))[:-1]]).astype(np.int64)

    def rows(self, which: int) -> int:
        return -(-int(self.primes(which).sum()) // self.divisor) * self.divisor

    def multipliers(self, which: int) -> np.ndarray:
        """int64 [size]: odd numbers, small enough that a token times one fits 63 bits (Steele et
        al. 2014, splitmix64)."""
        half = max(1, ((1 << 63) - 1) // max(self.vocab, 1) // 2)
        seed = self.seed + 10007 * which
        drawn = [_splitmix64((seed + GAMMA * (i + 1)) & MASK) for i in range(self.size)]
        return np.array([2 * (z % half) + 1 for z in drawn], np.int64)


def _splitmix64(z: int) -> int:
    z = (z + GAMMA) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


@functools.lru_cache(maxsize=8)
def primes_from(base: int, count: int) -> tuple[int, ...]:
    """The first `count` primes not below `base`."""
    found: list[int] = []
    n = max(base, 2)
    while len(found) < count:
        if all(n % d for d in range(2, math.isqrt(n) + 1)):
            found.append(n)
        n += 1
    return tuple(found)


# --- On the host --------------------------------------------------------------------------------


def declare_ngram_tables(ngram: NGram, layers: tuple[int, ...], prefix: str) -> dict[str, Table]:
    """The tables of the memories in `layers`, in order, under `prefix` (with `{layer}`).

    Checkpoints store what the hashing needs beside the table; it is computed where they do not.
    """
    tables: dict[str, Table] = {}
    for which, layer in enumerate(layers):
        where = prefix.format(layer=layer)

        def names(name: str, where: str = where) -> tuple[str, ...]:
            short = where.replace("model.language_model.", "model.", 1)
            return tuple(dict.fromkeys((f"{where}.{name}", f"{short}.{name}")))

        sharded, single = (
            names("ngram_embedding.shard_{shard}.weight"),
            names("ngram_embedding.weight"),
        )
        tables[f"ngram_{which}"] = Table(
            sharded[0],
            (ngram.rows(which), ngram.row),
            also=(*sharded[1:], *single),
            scale=names("ngram_embedding.weight_scale"),
        )
        for key, name, count in (
            ("multipliers", "layer_multipliers", ngram.size),
            ("sizes", "ngram_heads_vocab_sizes", ngram.all_heads),
            ("offsets", "ngram_heads_offsets", ngram.all_heads),
        ):
            first, *also = names(name)
            tables[f"ngram_{which}_{key}"] = Table(first, (count,), also=tuple(also), optional=True)
    return tables


def ngram_shapes(ngram: NGram, memories: int) -> dict[str, tuple[int, ...]]:
    """What a token's lookup gives, by name."""
    return {f"ngram_{which}": (ngram.width,) for which in range(memories)}


def hash_rows(
    tokens: np.ndarray,
    start: int,
    count: int,
    ngram: NGram,
    multipliers: np.ndarray,
    sizes: np.ndarray,
    offsets: np.ndarray,
) -> np.ndarray:
    """int64 [count, all_heads]: the table rows of positions start .. start + count - 1.

    Args:
      tokens: int [at least start + count], the sequence's tokens; only the last size - 1 in
        front of `start` are looked at.
    """
    back = min(start, ngram.size - 1)
    x = np.asarray(tokens[start - back : start + count], np.int64)
    x = np.concatenate([np.full(ngram.size - 1 - back, ngram.end, np.int64), x])
    here = ngram.size - 1 + np.arange(count)
    mix = x[here] * multipliers[0]
    crossed = np.zeros(count, bool)
    found = []
    for s in range(1, ngram.size):
        earlier = x[here - s]
        crossed |= earlier == ngram.end
        mix = mix ^ (np.where(crossed, ngram.end, earlier) * multipliers[s])
        own = slice((s - 1) * ngram.heads, s * ngram.heads)
        found.append(mix[:, None] % sizes[own] + offsets[own])
    return np.concatenate(found, axis=1)


def ngram_prelude(
    ngram: NGram, memories: int, opened: dict[str, Any], tokens: np.ndarray, start: int, count: int
) -> dict[str, np.ndarray]:
    """float32 [count, width] for every memory, by name."""
    out = {}
    for which in range(memories):
        name = f"ngram_{which}"

        def stored(key: str, computed: np.ndarray, name: str = name) -> np.ndarray:
            found = opened.get(f"{name}_{key}")
            return computed if found is None else found.whole().astype(np.int64)

        rows = hash_rows(
            tokens,
            start,
            count,
            ngram,
            stored("multipliers", ngram.multipliers(which)),
            stored("sizes", ngram.primes(which)),
            stored("offsets", ngram.offsets(which)),
        )
        out[name] = opened[name].take(rows).reshape(count, -1)
    return out


# --- On the device ------------------------------------------------------------------------------


def declare_ngram(
    ngram: NGram, streams: int, hidden: int, layers: tuple[int, ...], prefix: str
) -> dict[str, Param]:
    """Parameters under `prefix` (with `{layer}`); every rank holds all of them."""
    wide, into = Dim(streams * hidden), Dim(ngram.width)
    params = {
        "key": Param(f"{prefix}.key_proj.weight", (wide, into), layers),
        "value": Param(f"{prefix}.value_proj.weight", (Dim(hidden, "embed"), into), layers),
        "conv": declare_conv(wide, ngram.taps, layers, f"{prefix}.conv1d.weight"),
    }
    for name in ("key", "query", "conv"):
        params[f"{name}_norm"] = Param(
            f"{prefix}.norm_{name}.weight", (wide,), layers, init="zeros"
        )
    return params


def declare_ngram_caches(
    ngram: NGram, streams: int, hidden: int, layers: tuple[int, ...]
) -> dict[str, caches.Declaration]:
    """The plane "ngram_conv"; the tokens themselves are the host's."""
    return {"ngram_conv": declare_tail(Dim(streams * hidden), ngram.taps, layers, ngram.size)}


def ngram_memory(
    streams: jax.Array,
    p: dict[str, Any],
    at: int,
    cache: caches.Caches,
    batch: Batch,
    ngram: NGram,
    eps: float,
    context: Context,
) -> tuple[jax.Array, caches.Caches]:
    """What memory number `at` adds to the streams [B, Q, N, H], and the caches.

    Raises:
      ValueError: the batch comes without the host's rows.
    """
    name = f"ngram_{at}"
    if batch.prelude is None or name not in batch.prelude:
        raise ValueError(f"this model needs batch.prelude[{name!r}]; see models.tables")
    e = batch.prelude[name].astype(streams.dtype)
    key, value = linear_group(e, (p["key"], p["value"]), at, context=context, rows=batch.rows)
    key = stream_norm(key.reshape(streams.shape), p["key_norm"], at, eps)
    query = stream_norm(streams, p["query_norm"], at, eps)
    a = jnp.sum(key.astype(jnp.float32) * query.astype(jnp.float32), axis=-1)
    a = a * streams.shape[-1] ** -0.5
    a = jnp.sign(a) * jnp.sqrt(jnp.maximum(jnp.abs(a), 1e-6))
    u = jax.nn.sigmoid(a).astype(streams.dtype)[..., None] * value[..., None, :]
    inner = stream_norm(u, p["conv_norm"], at, eps)
    inner, cache = short_conv(
        inner.reshape(*inner.shape[:2], -1), p["conv"], at, cache, "ngram_conv", at, batch, context,
        dilation=ngram.size,
    )  # fmt: skip
    return u + inner.reshape(u.shape), cache
