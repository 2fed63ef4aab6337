"""One projection of the expert layer by itself, for what gate and up cannot share a kernel in.

Experts may be of several formats (each is multiplied as it is, and their results are added: an expert
has zeros where it is not), in rotated bases or with sorted inputs, each its own, and cut out of blocks
(`formats.cover`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ...weights.formats.base import COLS
from ...weights.formats.cover import Covered
from ...weights.formats.mixed import Mixed
from ..linear import cover, rotated, tuning
from ..linear.planes import Spec, planes_of, spec_of
from ..linear.triton import in_order
from .pairs import parts


@dataclasses.dataclass(frozen=True)
class Choice:
    """Which experts the tokens of a launch have chosen.

    Attributes:
      ids: int32 [T, k]; -1 is none.
      expert, pair: int32 [tiles] and [tiles, rows], see `groups.tiles`.
    """

    ids: jax.Array
    expert: jax.Array
    pair: jax.Array


def specs(w: Any) -> list[Spec] | str:
    """The Spec of each format among experts, or why the kernel cannot take one."""
    found = [cover.spec_below(stack) for stack in (w.stacks if isinstance(w, Mixed) else (w,))]
    refused = [spec for spec in found if isinstance(spec, str)]
    return refused[0] if refused else [spec for spec in found if isinstance(spec, Spec)]


def project(
    x: jax.Array,
    w: Any,
    layer: Any,
    choice: Choice,
    share: jax.Array | None = None,
    dtype: Any = jnp.float32,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Rows of x times their experts' matrices.

    Args:
      x: bfloat16 or float32, [T, K] or, with a row for each choice, [T * k, K]. It is rounded to
        bfloat16, in a rotated basis only to float16.
      w: [L, E, N, K], of formats that have `specs`.
      share: None, or float32 [T, k]: choices are weighted so and added.
      dtype: of the result; sums are float32.

    Returns:
      [T * k, N]; with `share` [T, N]. A row's bits depend on nothing but the row and its
      experts.
    """
    stacks = _stacks(w, layer)
    of = dtype if len(stacks) == 1 else jnp.float32
    found = [
        _of_one_format(x, stack, matrices, choice, share, of, interpret)
        for stack, matrices in stacks
    ]
    return in_order(found).astype(dtype)


def added(each: jax.Array, share: jax.Array | None) -> jax.Array:
    """A token's choices [T * k, N] under their weights [T, k], in their order: [T, N]."""
    if share is None:
        return each
    tokens, k = share.shape
    each = each.reshape(tokens, k, -1)
    return in_order([share[:, j, None] * each[:, j] for j in range(k)])


def _stacks(w: Any, layer: Any) -> list[tuple[Any, jax.Array]]:
    """Each format's stack, and int32 [E]: the place of each of the layer's experts in there, all leading
    axes taken as one; -1 where it is in another stack."""
    count = w.shape[1]
    first = jnp.asarray(layer, jnp.int32) * count
    if not isinstance(w, Mixed):
        return [(w, first + jnp.arange(count, dtype=jnp.int32))]
    kinds, slots = (
        lax.dynamic_slice_in_dim(jnp.asarray(every, jnp.int32), first, count)
        for every in (w.kinds, w.slots)
    )
    return [(stack, jnp.where(kinds == i, slots, -1)) for i, stack in enumerate(w.stacks)]


def _of_one_format(
    x: jax.Array,
    w: Any,
    matrices: jax.Array,
    choice: Choice,
    share: jax.Array | None,
    dtype: Any,
    interpret: bool,
) -> jax.Array:
    """`project` with one stack; zeros from experts that are not in it."""
    mine = jnp.maximum(matrices[choice.ids.reshape(-1)], 0)
    if isinstance(w, Covered):
        index = cover.places(w, mine)
        if w.axis == COLS:
            x = cover.spread(_of_pairs(x, mine), index, w.inner.shape[COLS])
            return _of_one_format(x, w.inner, matrices, choice, share, dtype, interpret)
        each = _of_one_format(x, w.inner, matrices, choice, None, jnp.float32, interpret)
        return added(cover.taken(each, index), share).astype(dtype)
    spec, planes = spec_of(w), planes_of(w)
    assert isinstance(spec, Spec)
    tokens, pairs = choice.ids.shape[0], mine.shape[0]
    member = jnp.where(choice.expert < 0, -1, matrices[jnp.maximum(choice.expert, 0)])

    def times(spec: Spec, x: jax.Array) -> jax.Array:
        tile = tuning.expert_tile(spec, tokens, choice.pair.shape[1], choice.ids.shape[1])
        per = pairs // x.shape[0]
        [found] = parts(spec, x, [planes], member, choice.pair, per, pairs, tile, interpret)
        return found

    if spec.code == "trellis":
        turned, most = rotated.into(x, planes, mine, interpret, pairs // x.shape[0])
        sums = times(rotated.padded(spec), turned)
        return rotated.back(spec, sums, planes, mine, most, dtype, interpret, share)
    x = x.astype(jnp.bfloat16)
    if spec.ordered:
        assert planes.order is not None
        x = jnp.take_along_axis(_of_pairs(x, mine), planes.order[mine], axis=1)
    return added(in_order(times(spec, x)), share).astype(dtype)


def _of_pairs(x: jax.Array, pairs: jax.Array) -> jax.Array:
    """A row of x for each pair."""
    return x if x.shape[0] == len(pairs) else jnp.repeat(x, len(pairs) // x.shape[0], axis=0)
