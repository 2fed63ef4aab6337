"""Choosing tokens on the device: one pure function inside the jitted step.

Order: raw log-probabilities, then logit bias, penalties, grammar mask, temperature, top-k, top-p,
min-p, and the draw. Which of these a row uses is data, never a shape; work that no row of the batch
needs is skipped under `lax.cond`.

**Rows are independent to the bit**: what a row gets does not depend on the other rows nor on how
many there are. So all reductions over the vocabulary are either exact in any order (maxima,
integer counts) or `row_sum`, which fixes the order; no branch that other rows cause changes a row
that did not ask for it; and the random generator is a counter: its whole state is (seed, position).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from ..kernels.row_sums import row_sum, upto
from ..mesh.context import Context

TOP = 20
"""How many of the most likely tokens a step reports."""

P_SLACK = 1 - 2.0**-20
"""A nucleus is full when it holds top_p of the mass to one part in a million: float32 sums must not
decide whether ten equal tokens hold ten tenths."""

_LAST_KEY = 0x7F800000  # the key of a token without mass
_MOST = 0x7FFFFFFF
_KEY_BITS = 32


@struct.dataclass
class SamplingRows:
    """How each of B rows samples; `records.Sampling` has the meaning and ranges of the options.

    Attributes:
      temperature, top_p, min_p, presence, frequency, repetition: float32 [B].
      top_k: int32 [B]; 0 keeps all.
      seed: uint32 [B, 2], high word first.
      position: int32 [B], the absolute position of the token that is sampled.
      logprobs: bool [B], whether the row wants the most likely tokens.
      bias_ids, bias_values: int32 [B, N] and float32 [B, N]; ids of a row differ, -1 pads.
      mask: uint32 [B, ceil(V / 32)]; bit t % 32 of word t // 32 allows token t. An unconstrained
        row has all bits set, those behind V too.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    presence: jax.Array
    frequency: jax.Array
    repetition: jax.Array
    seed: jax.Array
    position: jax.Array
    logprobs: jax.Array
    bias_ids: jax.Array
    bias_values: jax.Array
    mask: jax.Array


class Sampled(NamedTuple):
    """token int32 [B]; logprob float32 [B], natural log, of the raw distribution; top_ids int32
    [B, TOP] and top_logprobs float32 [B, TOP], most likely first, lower id first on ties. A row
    without top tokens (not wanted, or a vocabulary below TOP) has -1 and -inf there."""

    token: jax.Array
    logprob: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


def sample(
    logits: jax.Array,
    rows: SamplingRows,
    counts: jax.Array,
    prompt: jax.Array,
    slots: jax.Array | None = None,
    context: Context = Context(),
) -> Sampled:
    """Samples one token per row from raw logits float32 [B, V].

    The penalties look at `counts` int32 [S, V], how often each slot generated a token, and
    `prompt` bool [S, V], whether its prompt holds it. Row b reads slot `slots[b]` (int32 [B]), and
    only where some row has a penalty; without `slots`, S is B and row b reads slot b.

    - Temperature 0 takes the largest logit after bias, penalties and mask, the lowest id on ties.
      Otherwise the draw is Gumbel-max: argmax(logit / temperature + noise) is a sample of the
      softmax (Gumbel 1954; Maddison et al. 2014, A* Sampling).
    - The filters apply in the order top-k, top-p, min-p, each to what the one before left, with
      tokens ordered by falling probability, lower id first on ties. top-k keeps exactly k. top-p
      (Holtzman et al. 2020) keeps the shortest run that holds p of the mass left by top-k, so
      the token that crosses p stays. min-p (Nguyen et al. 2024) keeps probabilities of at least
      min_p times the largest. At least one token always stays.
    - Repetition penalty first, then frequency and presence.
    - NaN logits are never sampled, and the row's log-probabilities are NaN, so the caller can see
      it. A row where nothing is left to sample (all NaN, an empty mask) returns token 0. Infinite
      logits count as the largest float.
    """
    logits = logits.astype(jnp.float32)
    adjusted = _adjust(_finite(logits), rows, counts, prompt, slots)
    greedy = _argmax(adjusted)
    random = rows.temperature > 0
    drawn = lax.cond(jnp.any(random), lambda: _draw(adjusted, rows, context), lambda: greedy)
    token = jnp.where(random, drawn, greedy)
    norm = _log_norm(logits)
    logprob = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0] - norm
    wanted = rows.logprobs
    none = _no_top(logits.shape[0])
    ids, values = lax.cond(jnp.any(wanted), lambda: _top(logits, norm), lambda: none)
    ids = jnp.where(wanted[:, None], ids, none[0])
    values = jnp.where(wanted[:, None], values, none[1])
    return Sampled(token, logprob, ids, values)


def prompt_logprobs(
    logits: Callable[[jax.Array], jax.Array],
    hidden: jax.Array,
    next_tokens: jax.Array,
    wanted: jax.Array | bool = True,
    chunk: int = 64,
) -> Sampled:
    """Log-probabilities of the tokens that follow each of T positions of a prompt.

    Args:
      logits: maps [chunk, ...] to raw logits [chunk, V]. No more logits than that exist at a time.
      hidden: [T, ...], what `logits` takes for each position.
      next_tokens: int32 [T], the token at the next position (any valid id where there is none).
      wanted: bool []; False skips the work (log-probabilities are then 0, top ids -1).
      chunk: positions at a time; T is padded to a multiple of it.

    Returns:
      `Sampled` over T in place of B, with `next_tokens` as token.
    """
    total = next_tokens.shape[0]
    chunk = min(chunk, total)
    chunks = -(-total // chunk)

    def split(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [(0, chunks * chunk - total)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(chunks, chunk, *x.shape[1:])

    def one(part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        raw = logits(part[0]).astype(jnp.float32)
        norm = _log_norm(raw)
        chosen = jnp.take_along_axis(raw, part[1][:, None], axis=-1)[:, 0] - norm
        return chosen, *_top(raw, norm)

    def score() -> tuple[jax.Array, jax.Array, jax.Array]:
        logprob, ids, values = lax.map(one, (split(hidden), split(next_tokens)))
        return (
            logprob.reshape(-1)[:total],
            ids.reshape(-1, TOP)[:total],
            values.reshape(-1, TOP)[:total],
        )

    def skip() -> tuple[jax.Array, jax.Array, jax.Array]:
        return jnp.zeros((total,), jnp.float32), *_no_top(total)

    return Sampled(next_tokens, *lax.cond(wanted, score, skip))


# Log-probabilities.


def _finite(logits: jax.Array) -> jax.Array:
    """NaN to -inf, +inf to the largest float."""
    largest = jnp.finfo(jnp.float32).max
    return jnp.where(jnp.isnan(logits), -jnp.inf, jnp.minimum(logits, largest))


def _log_norm(logits: jax.Array) -> jax.Array:
    """log(sum(exp(logits))) of float32 [B, V]: [B]; NaN where any logit is."""
    top = jnp.max(logits, axis=-1)
    top = jnp.where(jnp.isfinite(top), top, 0)
    return top + jnp.log(row_sum(lambda x: x, jnp.exp(logits - top[:, None])))


TOP_BLOCK = 128
"""Tokens that `_top` looks at together."""


def _top(logits: jax.Array, norm: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The TOP most likely tokens of float32 [B, V] and their log-probabilities: [B, TOP] both.

    Chosen among the TOP blocks of tokens with the largest entries, lower blocks first on ties: a
    token of another block has at least TOP tokens in front of it, one in each of them. Sorting
    the whole vocabulary would take a GPU ten times as long.
    """
    batch, vocab = logits.shape
    count = min(TOP, vocab)
    logits = jnp.where(logits == 0, 0, logits)  # -0 is no less likely than 0
    blocks = -(-vocab // TOP_BLOCK)
    if blocks > count:
        tail = blocks * TOP_BLOCK - vocab
        cells = jnp.pad(logits, ((0, 0), (0, tail)), constant_values=-jnp.inf)
        cells = cells.reshape(batch, blocks, TOP_BLOCK)
        _, best = lax.top_k(jnp.max(cells, axis=-1), count)
        best = jnp.sort(best, axis=-1)
        logits = jnp.take_along_axis(cells, best[..., None], axis=1).reshape(batch, -1)
        names = (best[..., None] * TOP_BLOCK + jnp.arange(TOP_BLOCK)).reshape(batch, -1)
    else:
        names = jnp.broadcast_to(jnp.arange(vocab), logits.shape)
    values, ids = lax.top_k(logits, count)
    ids = jnp.take_along_axis(names, ids, axis=-1).astype(jnp.int32)
    pad = ((0, 0), (0, TOP - count))
    ids = jnp.pad(ids, pad, constant_values=-1)
    return ids, jnp.pad(values - norm[:, None], pad, constant_values=-jnp.inf)


def _no_top(size: int) -> tuple[jax.Array, jax.Array]:
    return jnp.full((size, TOP), -1, jnp.int32), jnp.full((size, TOP), -jnp.inf, jnp.float32)


# What changes the logits.


def _adjust(
    logits: jax.Array,
    rows: SamplingRows,
    counts: jax.Array,
    prompt: jax.Array,
    slots: jax.Array | None,
) -> jax.Array:
    """Bias, penalties, mask. One outer condition: on a GPU each one costs a round trip."""
    biased = rows.bias_ids >= 0
    penalised = (rows.presence != 0) | (rows.frequency != 0) | (rows.repetition != 1)
    constrained = jnp.any(~rows.mask != 0, axis=-1)

    def bias(x: jax.Array) -> jax.Array:
        b = jnp.arange(x.shape[0])[:, None]
        ids = jnp.where(biased, rows.bias_ids, x.shape[1])
        return x.at[b, ids].add(rows.bias_values, mode="drop")

    def penalise(x: jax.Array) -> jax.Array:
        count, seen = (counts, prompt) if slots is None else (counts[slots], prompt[slots])
        generated = count > 0
        by = rows.repetition[:, None]
        y = jnp.where(generated | seen, jnp.where(x > 0, x / by, x * by), x)
        y -= rows.frequency[:, None] * count.astype(jnp.float32)
        y -= jnp.where(generated, rows.presence[:, None], 0)
        return jnp.where(penalised[:, None], y, x)

    def mask(x: jax.Array) -> jax.Array:
        bits = (rows.mask[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
        allowed = bits.reshape(x.shape[0], -1)[:, : x.shape[1]] != 0
        return jnp.where(allowed, x, -jnp.inf)

    def adjust(x: jax.Array) -> jax.Array:
        for wanted, change in ((biased, bias), (penalised, penalise), (constrained, mask)):
            x = lax.cond(jnp.any(wanted), change, lambda x: x, x)
        return x

    wanted = jnp.any(biased) | jnp.any(penalised) | jnp.any(constrained)
    return lax.cond(wanted, adjust, lambda x: x, logits)


# The draw.


def _draw(logits: jax.Array, rows: SamplingRows, context: Context) -> jax.Array:
    """One token per row at its temperature: int32 [B]. Rows at temperature 0 mean nothing."""
    vocab = logits.shape[1]
    top = jnp.max(logits, axis=-1, keepdims=True)
    top = jnp.where(jnp.isfinite(top), top, 0)
    temperature = jnp.where(rows.temperature > 0, rows.temperature, 1)[:, None]
    scaled = (logits - top) / temperature  # <= 0; shifted first, so that nothing overflows
    k = jnp.where((rows.top_k > 0) & (rows.top_k < vocab), rows.top_k, vocab)
    filtered = (rows.temperature > 0) & ((k < vocab) | (rows.top_p < 1) | (rows.min_p > 0))
    scaled = lax.cond(
        jnp.any(filtered),
        lambda z: jnp.where(filtered[:, None] & ~_kept(z, k, rows, context), -jnp.inf, z),
        lambda z: z,
        scaled,
    )
    return _argmax(scaled + _noise(rows, vocab))


def _argmax(x: jax.Array) -> jax.Array:
    """Lowest id of the largest of [B, V]: int32 [B]. Two plain reductions, which vectorise where
    the reduction over pairs behind jnp.argmax does not."""
    ids = jnp.arange(x.shape[1], dtype=jnp.int32)
    return jnp.min(jnp.where(x == jnp.max(x, axis=-1, keepdims=True), ids, x.shape[1] - 1), axis=-1)


def _noise(rows: SamplingRows, vocab: int) -> jax.Array:
    """Standard Gumbel noise float32 [B, V], a function of each row's (seed, position) alone.

    With u uniform, -log(-log1p(-u)) rather than -log(-log(u)): floats are dense near 0, not near
    1, and the large values that decide among unlikely tokens come from there.
    """
    chunks = -(-vocab // 1024)  # of 1024 tokens: 512 first words of a block, then 512 second ones
    blocks = jnp.arange(chunks * 512, dtype=jnp.uint32)[None]
    first, second = threefry2x32(
        rows.seed[:, :1], rows.seed[:, 1:], rows.position[:, None].astype(jnp.uint32), blocks
    )
    words = [word.reshape(-1, chunks, 512) for word in (first, second)]
    bits = jnp.stack(words, axis=2).reshape(-1, chunks * 1024)[:, :vocab]
    uniform = (bits.astype(jnp.float32) + 0.5) * jnp.float32(2.0**-32)
    uniform = jnp.minimum(uniform, jnp.float32(1 - 2.0**-24))
    return -jnp.log(-jnp.log1p(-uniform))


def threefry2x32(
    key0: jax.Array, key1: jax.Array, x0: jax.Array, x1: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32 with 20 rounds (Salmon et al. 2011, Parallel Random Numbers: As Easy as 1, 2,
    3), the generator of jax.random, on broadcast uint32 arrays: two words a block.

    Written out here because jax.random rolls the rounds into a loop on a CPU (5 times slower) and
    uses one word of each block.
    """
    keys = (key0, key1, key0 ^ key1 ^ jnp.uint32(0x1BD11BDA))
    x0, x1 = x0 + keys[0], x1 + keys[1]
    for i in range(5):
        for r in ((13, 15, 26, 6), (17, 29, 16, 24))[i % 2]:
            x0 = x0 + x1
            x1 = ((x1 << r) | (x1 >> (32 - r))) ^ x0
        x0 = x0 + keys[(i + 1) % 3]
        x1 = x1 + keys[(i + 2) % 3] + jnp.uint32(i + 1)
    return x0, x1


def _kept(scaled: jax.Array, k: jax.Array, rows: SamplingRows, context: Context) -> jax.Array:
    """Which tokens the filters leave: bool [B, V]. `scaled` is <= 0 and 0 at the most likely.

    Tokens in order of falling probability have rising integer keys (the bits of |scaled|). What a
    filter keeps is a run from the front of that order: all keys below an edge, and `ties` of
    those on it, by id. Edges are searched digit by digit: no sort, and exact.
    """
    size, vocab = scaled.shape
    keys = lax.bitcast_convert_type(jnp.abs(scaled), jnp.int32)
    mass = jnp.exp(scaled)

    def below(edge: jax.Array, weights: jax.Array | None) -> jax.Array:
        return upto(keys, weights, edge[:, None] - 1, context=context)[:, 0]

    def by_count() -> tuple[jax.Array, jax.Array]:
        edge = _search(
            lambda t: upto(keys, None, t, context=context) >= k[:, None], size, _KEY_BITS, context
        )
        return edge, k - below(edge, None)

    everything = jnp.full((size,), _LAST_KEY, jnp.int32), jnp.full((size,), vocab, jnp.int32)
    edge, ties = _where(k < vocab, by_count, everything)

    def by_mass() -> tuple[jax.Array, jax.Array]:
        def at(edge: jax.Array) -> jax.Array:
            """The mass of one token on the edge."""
            return jnp.max(jnp.where(keys == edge[:, None], mass, 0), axis=-1)

        left = below(edge, mass) + ties.astype(jnp.float32) * at(edge)
        target = left * rows.top_p * jnp.float32(P_SLACK)
        new = _search(
            lambda t: upto(keys, mass, t, context=context) >= target[:, None], size, _KEY_BITS, context
        )
        new = jnp.minimum(new, edge)
        each = at(new)
        lacking = (target - below(new, mass)) / jnp.where(each > 0, each, 1)
        need = jnp.clip(jnp.ceil(lacking), 1, vocab).astype(jnp.int32)
        return new, jnp.minimum(need, jnp.where(new == edge, ties, vocab))

    edge, ties = _where(rows.top_p < 1, by_mass, (edge, ties))
    on = keys == edge[:, None]

    def by_id() -> jax.Array:
        ids = jnp.arange(vocab, dtype=jnp.int32)
        order = jnp.where(on, ids, vocab)
        bits = -(-vocab.bit_length() // 4) * 4
        last = _search(
            lambda t: upto(order, None, t, context=context) >= ties[:, None], size, bits, context
        )
        return on & (ids <= last[:, None])

    crowded = jnp.any(jnp.sum(on, axis=-1, dtype=jnp.int32) > ties)
    some = lax.cond(crowded, by_id, lambda: on)
    return ((keys < edge[:, None]) | some) & (mass >= rows.min_p[:, None])


def _search(
    enough: Callable[[jax.Array], jax.Array], size: int, bits: int, context: Context
) -> jax.Array:
    """For each of `size` rows the least number for which `enough` holds: int32 [size].

    Sixteen candidates a pass, four bits of the number from the top: reading the keys is what a
    pass costs, so it is as cheap as one candidate. `enough` maps int32 [size, 16] to bool; it
    holds from some number on, and at the largest by assumption.
    """
    digits = jnp.arange(16, dtype=jnp.uint32)

    def narrow(step: jax.Array, low: jax.Array) -> jax.Array:
        shift = jnp.uint32(bits - 4) - 4 * step.astype(jnp.uint32)
        rest = (jnp.uint32(1) << shift) - 1  # the largest number that starts with these digits
        candidates = jnp.minimum((low[:, None] | (digits << shift)) | rest, _MOST)
        lacks = ~enough(candidates.astype(jnp.int32))
        digit = jnp.minimum(jnp.sum(lacks, axis=-1, dtype=jnp.uint32), 15)
        return low | (digit << shift)

    # XLA puts a condition with a loop in it into no command buffer: the host would wait for its
    # predicate in every step.
    none = jnp.zeros((size,), jnp.uint32)
    low = lax.fori_loop(0, bits // 4, narrow, none, unroll=context.platform == "cuda")
    return jnp.minimum(low, _MOST).astype(jnp.int32)


def _where(
    wanted: jax.Array, compute: Callable[[], tuple[jax.Array, ...]], other: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    """`compute()` in the rows that want it, `other` elsewhere; not computed if no row does."""
    new = lax.cond(jnp.any(wanted), compute, lambda: other)
    return tuple(jnp.where(wanted, a, b) for a, b in zip(new, other, strict=True))
