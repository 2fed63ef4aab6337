"""The one rectangular batch: prefill tiles, decode, verification and scoring are its shapes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class Batch:
    """B rows of up to Q new tokens each, every row a sequence with its own caches.

    Attributes:
      tokens: int32 [B, Q].
      start: int32 [B], the position of each row's first token (how many came before).
      lengths: int32 [B], how many of the Q tokens are real; 0 closes the row. Whatever stands
        behind them never touches a cache or a state.
      pages: int32 [B, T], the row's page table: token at position p lives in page
        `pages[b, p // page_size]`.
      slots: int32 [B], where the row's rings and states live.
      rope_positions: None, or int32 [B, Q, 3] for multi-axis rotary positions.
      embeddings, embedding_mask: None, or [B, Q, H] and bool [B, Q]: rows that replace the
        token's own embedding (images).
      spans: None, or int32 [B, Q]: tokens that share a span id > 0 see each other in both
        directions.
      prelude: rows that the host gathered for these tokens (n-gram tables), by name.
    """

    tokens: jax.Array
    start: jax.Array
    lengths: jax.Array
    pages: jax.Array
    slots: jax.Array
    rope_positions: jax.Array | None = None
    embeddings: jax.Array | None = None
    embedding_mask: jax.Array | None = None
    spans: jax.Array | None = None
    prelude: dict[str, Any] | None = None

    @property
    def positions(self) -> jax.Array:
        """int32 [B, Q]."""
        return self.start[:, None] + jnp.arange(self.tokens.shape[1], dtype=jnp.int32)

    @property
    def valid(self) -> jax.Array:
        """bool [B, Q]: the real tokens."""
        return jnp.arange(self.tokens.shape[1]) < self.lengths[:, None]

    @property
    def rows(self) -> jax.Array:
        """int32 []: leading rows of the flattened [B * Q] tokens that hold anything real, so that
        a kernel may skip the padding behind them."""
        b, q = self.tokens.shape
        ends = jnp.where(self.lengths > 0, jnp.arange(b, dtype=jnp.int32) * q + self.lengths, 0)
        return jnp.max(ends)


def single(tokens: jax.Array, start: int = 0, page_size: int = 64) -> Batch:
    """One sequence of `tokens` int32 [Q] in slot 0 over pages 0, 1, 2, ..."""
    tokens = jnp.asarray(tokens, jnp.int32)[None]
    last = start + tokens.shape[1]
    return Batch(
        tokens=tokens,
        start=jnp.full((1,), start, jnp.int32),
        lengths=jnp.full((1,), tokens.shape[1], jnp.int32),
        pages=jnp.arange(-(-last // page_size), dtype=jnp.int32)[None],
        slots=jnp.zeros((1,), jnp.int32),
    )
