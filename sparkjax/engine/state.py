"""What lives on the device between steps: caches, newest tokens, lengths, sampling settings."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from .records import Submit

STOP_IDS = 32
"""Stop ids a request may have."""
BIASES = 1024
"""Logit biases a request may have."""


@struct.dataclass
class Slots:
    """Per-slot values, [S, ...], of the requests that hold the slots.

    Attributes:
      tokens: int32 [S], the newest token, not yet fed.
      lengths: int32 [S], how many tokens the caches hold.
      alive: bool [S], false once a stop id was sampled: later rows of the slot do nothing.
      counts: int32 [S, V], how often each token was generated.
      seen: bool [S, V], the tokens of the prompt.
      temperature, top_p, min_p, presence, frequency, repetition: float32 [S]; top_k: int32 [S].
      seed: uint32 [S, 2], high and low word.
      bias_ids, bias_values: int32 and float32 [S, BIASES]; unused places have id -1.
      stop_ids: int32 [S, STOP_IDS]; unused places are -1.
      logprobs: bool [S], whether anybody reads log-probabilities of this slot.
    """

    tokens: jax.Array
    lengths: jax.Array
    alive: jax.Array
    counts: jax.Array
    seen: jax.Array
    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    presence: jax.Array
    frequency: jax.Array
    repetition: jax.Array
    seed: jax.Array
    bias_ids: jax.Array
    bias_values: jax.Array
    stop_ids: jax.Array
    logprobs: jax.Array


@struct.dataclass
class State:
    """Everything that a step takes and gives back, donated."""

    caches: dict[str, jax.Array]
    slots: Slots


def empty_slots(slots: int, vocab: int) -> Slots:
    """Slots that nobody holds."""
    f32, i32 = jnp.float32, jnp.int32
    return Slots(
        tokens=jnp.zeros(slots, i32),
        lengths=jnp.zeros(slots, i32),
        alive=jnp.zeros(slots, bool),
        counts=jnp.zeros((slots, vocab), i32),
        seen=jnp.zeros((slots, vocab), bool),
        temperature=jnp.zeros(slots, f32),
        top_k=jnp.zeros(slots, i32),
        top_p=jnp.ones(slots, f32),
        min_p=jnp.zeros(slots, f32),
        presence=jnp.zeros(slots, f32),
        frequency=jnp.zeros(slots, f32),
        repetition=jnp.ones(slots, f32),
        seed=jnp.zeros((slots, 2), jnp.uint32),
        bias_ids=jnp.full((slots, BIASES), -1, i32),
        bias_values=jnp.zeros((slots, BIASES), f32),
        stop_ids=jnp.full((slots, STOP_IDS), -1, i32),
        logprobs=jnp.zeros(slots, bool),
    )


def settings(request: Submit) -> dict[str, Any]:
    """A request's values for its slot, by field of `Slots`."""
    s = request.sampling
    ids = np.full(BIASES, -1, np.int32)
    values = np.zeros(BIASES, np.float32)
    for at, (token, bias) in enumerate(s.logit_bias):
        ids[at], values[at] = token, bias
    stops = np.full(STOP_IDS, -1, np.int32)
    stops[: len(request.stop_ids)] = request.stop_ids
    return {
        "temperature": np.float32(s.temperature),
        "top_k": np.int32(min(s.top_k, 2**31 - 1)),
        "top_p": np.float32(s.top_p),
        "min_p": np.float32(s.min_p),
        "presence": np.float32(s.presence_penalty),
        "frequency": np.float32(s.frequency_penalty),
        "repetition": np.float32(s.repetition_penalty),
        "seed": np.array([s.seed >> 32, s.seed & 0xFFFFFFFF], np.uint32),
        "bias_ids": ids,
        "bias_values": values,
        "stop_ids": stops,
        "logprobs": np.bool_(s.logprobs is not None),
    }


def seat(slots: Slots, slot: Any, values: dict[str, Any]) -> Slots:
    """The slots with a new request in `slot`; nothing of the last one stays."""
    fields = {name: getattr(slots, name).at[slot].set(value) for name, value in values.items()}
    fields["tokens"] = slots.tokens.at[slot].set(0)
    fields["lengths"] = slots.lengths.at[slot].set(0)
    fields["alive"] = slots.alive.at[slot].set(True)
    fields["counts"] = slots.counts.at[slot].set(0)
    fields["seen"] = slots.seen.at[slot].set(False)
    return dataclasses.replace(slots, **fields)
