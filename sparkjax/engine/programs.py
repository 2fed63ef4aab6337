"""The device programs of the engine: seat a request, run a prefill tile, run a decode step.

A step is one rectangular forward pass whose rows find their tokens and lengths on the device, then
one sampler call. A decode step is two programs, since the grammar masks of its rows depend on
their newest tokens: the host makes them while the device computes the forward pass. Options (penalties, log-probabilities, grammar masks) are data: they never change
a shape, so each program is compiled once, before the first request.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from ..models.batch import Batch
from . import state as states
from .sampler import TOP, SamplingRows, prompt_logprobs, sample
from .state import State

# Columns of a tile's or row's packed int32 numbers, before its page table.
SLOT, START, LENGTH, EMIT, SCORE = range(5)
HEADER = 5

# Columns of a packed result row.
TOKEN, LOGPROB, TOP_IDS, TOP_LOGPROBS = 0, 1, 2, 2 + TOP
RESULT = 2 + 2 * TOP


def pack(token: jax.Array, logprob: jax.Array, ids: jax.Array, logprobs: jax.Array) -> jax.Array:
    """int32 [..., RESULT]: one array goes back to the host; floats ride as their bits."""

    def bits(x: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)

    return jnp.concatenate(
        [token[..., None], bits(logprob)[..., None], ids, bits(logprobs)], axis=-1
    )


def floats(packed: np.ndarray) -> np.ndarray:
    """The float32 values of packed columns."""
    return np.ascontiguousarray(packed).view(np.float32)


class Programs:
    """The step's programs for one model. All take and return the donated `State`.

    Attributes:
      seat: (state, slot int32 [], settings) -> state
      tile: (params, state, numbers int32 [1, HEADER + T], tokens int32 [1, Q], targets int32
        [1, Q], mask, prelude) -> (state, packed [1, RESULT], scores [Q, RESULT]); targets are the
        tokens that follow, for prompt log-probabilities.
      advance: (params, state, numbers int32 [B, HEADER + T], prelude) -> (state, residual [B,
        ...]): the forward pass of a decode step. LENGTH is 1 for a real row, 0 for padding.
        `prelude` is `Batch.prelude`: what a family looks up on the host, else None.
      choose: (params, slots, numbers, residual, mask) -> (slots, packed [B, RESULT]): the step's
        sampling. A row of a dead slot gives token -1.
    """

    def __init__(self, model: Any):
        self.model = model
        self.seat = jax.jit(self._seat, donate_argnums=0)
        self.tile = jax.jit(self._tile, donate_argnums=1)
        self.advance = jax.jit(self._advance, donate_argnums=1)
        self.choose = jax.jit(self._choose, donate_argnums=1)

    def decode(
        self, params: Any, state: State, numbers: np.ndarray, mask: Any, prelude: Any
    ) -> tuple[State, jax.Array]:
        """A whole decode step, both programs: (state, packed [B, RESULT])."""
        state, residual = self.advance(params, state, numbers, prelude)
        slots, packed = self.choose(params, state.slots, numbers, residual, mask)
        return State(state.caches, slots), packed

    # --- The programs ---------------------------------------------------------------------------

    def _seat(self, state: State, slot: jax.Array, values: dict[str, Any]) -> State:
        return dataclasses.replace(state, slots=states.seat(state.slots, slot, values))

    def _tile(
        self,
        params: Any,
        state: State,
        numbers: jax.Array,
        tokens: jax.Array,
        targets: jax.Array,
        mask: jax.Array,
        prelude: Any,
    ) -> tuple[State, jax.Array, jax.Array]:
        slot, length = numbers[:, SLOT], numbers[:, LENGTH]
        pages = numbers[:, HEADER:]
        batch = Batch(tokens, numbers[:, START], length, pages, slot, prelude=prelude)
        residual, kv = self._forward(params, state.caches, batch)
        slots = state.slots
        prompt = jnp.where(batch.valid, tokens, slots.seen.shape[1])
        slots = dataclasses.replace(
            slots,
            seen=slots.seen.at[slot[:, None], prompt].set(True, mode="drop"),
            lengths=slots.lengths.at[slot].set(batch.start + length),
        )
        last = jnp.take_along_axis(residual, _index(length - 1, residual), axis=1)[:, 0]
        emit = numbers[:, EMIT] > 0
        slots, packed = jax.lax.cond(
            emit.any(),
            lambda s: self._sample(params, s, slot, emit, last, mask),
            lambda s: (s, jnp.full((tokens.shape[0], RESULT), -1, jnp.int32)),
            slots,
        )
        # No token is below -1: this only makes scoring wait for sampling. Both may go round all
        # ranks, and what does not depend on one another may run in another order on each.
        sampled = packed[0, TOKEN] >= -1
        scores = jax.lax.cond(
            (numbers[:, SCORE] > 0).any() & sampled,
            lambda: self._score(params, residual[0], targets[0]),
            lambda: jnp.zeros((tokens.shape[1], RESULT), jnp.int32),
        )
        return State(kv, slots), packed, scores

    def _advance(
        self, params: Any, state: State, numbers: jax.Array, prelude: Any
    ) -> tuple[State, jax.Array]:
        slots, slot = state.slots, numbers[:, SLOT]
        live = _live(slots, numbers)
        start = jnp.where(live, slots.lengths[slot], 0)
        tokens, lengths = slots.tokens[slot][:, None], live.astype(jnp.int32)
        batch = Batch(tokens, start, lengths, numbers[:, HEADER:], slot, prelude=prelude)
        residual, kv = self._forward(params, state.caches, batch)
        where = jnp.where(live, slot, slots.tokens.shape[0])
        slots = dataclasses.replace(slots, lengths=slots.lengths.at[where].add(1, mode="drop"))
        return State(kv, slots), residual[:, 0]

    def _choose(
        self,
        params: Any,
        slots: states.Slots,
        numbers: jax.Array,
        residual: jax.Array,
        mask: jax.Array,
    ) -> tuple[states.Slots, jax.Array]:
        return self._sample(params, slots, numbers[:, SLOT], _live(slots, numbers), residual, mask)

    # --- Their parts ------------------------------------------------------------------------------

    def _forward(self, params: Any, kv: Any, batch: Batch) -> tuple[jax.Array, Any]:
        """(residual [B, Q, ...], caches) over the mesh."""
        model = self.model

        def inside(params: Any, kv: Any, batch: Batch) -> Any:
            out = model.family.forward(params, kv, batch, model.config, model.context)
            return out.residual, out.cache

        call = model.spread(inside, model.context, lambda cache: (PartitionSpec(), cache))
        return call(params, kv, batch)

    def _logits(self, params: Any, residual: jax.Array) -> jax.Array:
        """float32 [rows, vocab] of residual rows [rows, ...]."""
        return self.model.logits_of(params, residual)

    def _sample(
        self,
        params: Any,
        slots: states.Slots,
        slot: jax.Array,
        live: jax.Array,
        residual: jax.Array,
        mask: jax.Array,
    ) -> tuple[states.Slots, jax.Array]:
        """Samples one token for every live row, and tells the slots."""
        logits = self._logits(params, residual)
        rows = SamplingRows(
            temperature=slots.temperature[slot],
            top_k=slots.top_k[slot],
            top_p=slots.top_p[slot],
            min_p=slots.min_p[slot],
            presence=slots.presence[slot],
            frequency=slots.frequency[slot],
            repetition=slots.repetition[slot],
            seed=slots.seed[slot],
            position=slots.lengths[slot],
            logprobs=slots.logprobs[slot] & live,
            bias_ids=slots.bias_ids[slot],
            bias_values=slots.bias_values[slot],
            mask=mask,
        )
        with jax.named_scope("sample"):
            context = self.model.context
            drawn = sample(logits, rows, slots.counts, slots.seen, slot, context)
        token = jnp.where(live, drawn.token, -1)
        where = jnp.where(live, slot, slots.tokens.shape[0])
        stopped = (token[:, None] == slots.stop_ids[slot]).any(-1)
        slots = dataclasses.replace(
            slots,
            tokens=slots.tokens.at[where].set(token, mode="drop"),
            alive=slots.alive.at[where].set(~stopped, mode="drop"),
            counts=slots.counts.at[where, jnp.maximum(token, 0)].add(1, mode="drop"),
        )
        return slots, pack(token, drawn.logprob, drawn.top_ids, drawn.top_logprobs)

    def _score(self, params: Any, residual: jax.Array, targets: jax.Array) -> jax.Array:
        """int32 [Q, RESULT]: log-probabilities of the tokens that follow each position."""
        scored = prompt_logprobs(lambda rows: self._logits(params, rows), residual, targets)
        return pack(targets, scored.logprob, scored.top_ids, scored.top_logprobs)


def _live(slots: states.Slots, numbers: jax.Array) -> jax.Array:
    """bool [B], the rows that compute. Padding rows point at slot 0 and must not count as alive."""
    return (numbers[:, LENGTH] > 0) & slots.alive[numbers[:, SLOT]]


def _index(last: jax.Array, residual: jax.Array) -> jax.Array:
    """An index for take_along_axis that picks position `last[b]` of residual [B, Q, ...]."""
    return jnp.maximum(last, 0).reshape(-1, *(1,) * (residual.ndim - 1))
