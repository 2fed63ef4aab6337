"""The two ends of a model: token embedding and vocabulary projection, sharded over tokens."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ...kernels.linear import embed as embed_kernel
from ...kernels.linear import linear
from ...mesh.context import Context
from ...mesh.units import even
from ...weights import formats
from ..batch import Batch
from ..params import Dim, Param, spread


def declare_vocabulary(vocab: int, hidden: int, name: str, ranks: int, **kwargs: Any) -> Param:
    """A [vocabulary, hidden] table: an embedding or an output projection."""
    return Param(name, (spread(even(vocab, ranks), "vocab"), Dim(hidden, "embed")), **kwargs)


def embed_tokens(table: Any, batch: Batch, context: Context, scale: float | None = None) -> jax.Array:
    """The embeddings of the batch's tokens, [B, Q, H] in the context's dtype.

    Args:
      table: [V, H], this rank's rows of it.
      scale: multiplied in the compute dtype (gemma).
    """
    with jax.named_scope("embed"):
        if context.ranks == 1:
            x = embed_kernel(batch.tokens, table, context=context)
        else:
            rows = formats.logical_shape(table)[0]
            local = batch.tokens - context.rank() * rows
            mine = (local >= 0) & (local < rows)
            x = embed_kernel(jnp.clip(local, 0, rows - 1), table, context=context)
            # One rank holds the row and the others add exact zeros.
            x = context.all_reduce(jnp.where(mine[..., None], x, 0))
        if scale is not None:
            x = x * jnp.asarray(scale, x.dtype)
        if batch.embeddings is not None and batch.embedding_mask is not None:
            x = jnp.where(batch.embedding_mask[..., None], batch.embeddings.astype(x.dtype), x)
        return x


def vocabulary_logits(
    x: jax.Array, table: Any, vocab: int, context: Context, rows: jax.Array | None = None
) -> jax.Array:
    """x [..., H] against every token of the vocabulary: float32 [..., vocab]."""
    with jax.named_scope("logits"):
        logits = linear(x, table, context=context, rows=rows).astype(jnp.float32)
        return context.all_gather(logits)[..., :vocab]
