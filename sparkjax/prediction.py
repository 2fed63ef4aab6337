"""A model's own prediction layers (multi-token prediction) as a library object.

Row t of such a layer joins the state of token t with the embedding of token t + 1 and predicts
token t + 2; what it reads and how depths follow one another is the family's `DRAFTS`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from .mesh import spmd
from .model import Forward, Model, one_row, pages_for
from .models import cache as caches
from .models import params as declarations
from .models.batch import Batch
from .models.family import Drafts


class Predictor:
    """The prediction layers of a loaded model, over one sequence of up to `capacity` tokens."""

    def __init__(self, model: Model, capacity: int):
        if "draft" not in model.params:
            raise ValueError("this model has no prediction layers")
        self.model = model
        self.drafts: Drafts = getattr(model.family, "DRAFTS", Drafts())
        self.declared = model.family.declare_draft_caches(model.config, model.context.ranks)
        self.pages = pages_for(capacity, model.page)
        sizes = caches.Sizes(self.pages, model.page, slots=1)
        specs = caches.specs(self.declared, model.context.ranks)
        shapes = spmd.local(
            caches.shapes(self.declared, sizes, model.context.dtype), specs, model.context
        )
        places = spmd.shardings(model.mesh, specs)
        self.cache = jax.jit(
            lambda: {name: jnp.zeros(s.shape, s.dtype) for name, s in shapes.items()},
            out_shardings=places,
        )()

    @functools.cached_property
    def _step(self) -> Any:
        model = self.model

        def run(params: Any, cache: Any, batch: Batch, hidden: jax.Array, depth: int) -> Any:
            def inside(params: Any, cache: Any, batch: Batch, hidden: jax.Array) -> Any:
                logits, carry, cache = model.family.draft(
                    params, cache, batch, hidden, model.config, model.context, depth
                )
                return (logits, carry), cache

            ranks = model.context.ranks
            weights = declarations.specs(model.declared(ranks), ranks)
            planes = caches.specs(self.declared, ranks)
            inputs = (weights, planes, PartitionSpec(), PartitionSpec())
            call = spmd.spmd(inside, model.mesh, inputs, (PartitionSpec(), planes))
            return call(params, cache, batch, hidden)

        return jax.jit(run, static_argnums=4, donate_argnums=1)

    def reads(self, found: Forward) -> np.ndarray:
        """[T, ...]: the states of a forward pass, in the form that the first depth reads."""
        return found.residual if self.drafts.reads == "residual" else found.final

    def feed(
        self,
        following: np.ndarray,
        hidden: np.ndarray,
        start: int = 0,
        depth: int = 0,
        tile: int | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """One depth over the rows start .. start + n - 1.

        Args:
          following: int [n], the token behind each row's (`depth` later still where depths are
            not chained).
          hidden: [n, ...], the rows' states, or what the previous depth carried.
          tile: rows a program call.

        Returns:
          (float32 logits [n, vocab], carry [n, ...]).
        """
        count = len(following)
        tile = tile or count
        found = []
        for at in range(0, count, tile):
            n = min(tile, count - at)
            batch = one_row(np.asarray(following[at : at + n]), start + at, self.pages, tile)
            states = np.zeros((1, tile, *hidden.shape[1:]), hidden.dtype)
            states[0, :n] = hidden[at : at + n]
            out, self.cache = self._step(
                self.model.params, self.cache, batch, jnp.asarray(states), depth
            )
            found.append(tuple(np.asarray(o)[0, :n] for o in out))
        logits, carry = (np.concatenate(parts) for parts in zip(*found, strict=True))
        return logits, carry
