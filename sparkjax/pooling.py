"""A text as one vector: the model's final hidden states, pooled over the text's tokens.

A generating model was not trained for this; models that were (their cards say which pooling they
want) have the same layers and load the same way.
"""

from __future__ import annotations

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from .models.batch import Batch
from .models.cache import Sizes

POOLINGS: tuple[str, ...] = ("mean", "last")


class Pooler:
    """Pools texts of up to `room` tokens, one at a time; any thread may call it.

    Args:
      model: a `sparkjax.model.Model`.
      room: tokens of the longest text; the caches are made for it once.
      tile: tokens a program call. The result does not depend on it beyond rounding.
    """

    def __init__(self, model: Any, room: int, tile: int = 128):
        from .model import pages_for

        self.room, self.tile = room, tile
        self._model = model
        self._pages = pages_for(room, model.page)
        self._cache = model.new_caches(Sizes(self._pages, model.page, slots=1))
        self._lock = threading.Lock()
        self._program = jax.jit(self._run, donate_argnums=1)

    def _run(self, params: Any, cache: Any, batch: Batch, weights: jax.Array) -> Any:
        """(float32 [H], cache): the final hidden states of one tile, summed with weights [Q]."""
        model = self._model

        def inside(params: Any, cache: Any, batch: Batch, weights: jax.Array) -> Any:
            out = model.family.forward(params, cache, batch, model.config, model.context)
            final = model.family.final(params, out.residual, model.config, model.context)
            hidden = final[0].astype(jnp.float32)
            # Padded rows hold anything at all, and 0 times infinity would be seen.
            kept = jnp.where(batch.valid[0][:, None], hidden, 0)
            return jnp.einsum("q,qh->h", weights, kept, precision="highest"), out.cache

        call = model.spread(inside, model.context, lambda cache: (PartitionSpec(), cache))
        return call(params, cache, batch, weights)

    def embed(self, tokens: Any, pooling: str = "mean", normalize: bool = True) -> np.ndarray:
        """The vector of one text.

        Args:
          tokens: int [T], 1 <= T <= room.
          pooling: "mean" of all tokens, or the "last" token's.
          normalize: to length 1.

        Returns:
          float32 [H].

        Raises:
          ValueError: too few tokens, too many, or another pooling.
        """
        tokens = np.asarray(tokens, np.int32)
        if not 1 <= len(tokens) <= self.room:
            raise ValueError(f"pooling needs 1 to {self.room} tokens, got {len(tokens)}")
        if pooling not in POOLINGS:
            raise ValueError(f"pooling is {pooling!r}; allowed: {', '.join(POOLINGS)}")
        total = np.zeros((), np.float32)
        with self._lock:
            for start in range(0, len(tokens), self.tile):
                count = min(self.tile, len(tokens) - start)
                weights = np.zeros(self.tile, np.float32)
                if pooling == "mean":
                    weights[:count] = 1 / len(tokens)
                elif start + count == len(tokens):
                    weights[count - 1] = 1
                batch = self._model._row(tokens, start, count, self._pages, pad=self.tile)
                part, self._cache = self._program(self._model.params, self._cache, batch, weights)
                total = total + np.asarray(part)
        return total / max(float(np.linalg.norm(total)), 1e-12) if normalize else total
