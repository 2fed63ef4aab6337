"""The product kernel of the expert layer: every (token, choice) pair's row times its expert's matrix.

A program has a tile of pairs of one expert and some outputs. The inner loop is that of
`kernels/linear/tile.py`, so a row's result does not depend on its company.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from ..linear.planes import Planes, Spec
from ..linear.tile import Tile, contract, whole_scale
from ..linear.triton import Rows, by_field, in_order, steps_of


def product(
    spec: Spec,
    x: jax.Array,
    planes: Sequence[Planes],
    member: jax.Array,
    pair: jax.Array,
    per_row: int,
    pairs: int,
    finish: Callable[..., jax.Array],
    dtype: Any,
    tile: Tile,
    interpret: bool,
) -> jax.Array:
    """finish(x[pair // per_row] times each weight), for every pair of a tile: dtype [pairs, N], arbitrary
    for a pair that is in no tile. `finish` has rows and outputs in either order. Other arguments are
    those of `parts`."""
    if tile.splits == 1:
        [[y]] = parts(spec, x, planes, member, pair, per_row, pairs, tile, interpret, finish, dtype)
        return y
    found = parts(spec, x, planes, member, pair, per_row, pairs, tile, interpret)
    return finish(*map(in_order, found)).astype(dtype)


def parts(
    spec: Spec,
    x: jax.Array,
    planes: Sequence[Planes],
    member: jax.Array,
    pair: jax.Array,
    per_row: int,
    pairs: int,
    tile: Tile,
    interpret: bool,
    finish: Callable[..., jax.Array] | None = None,
    dtype: Any = jnp.float32,
) -> list[jax.Array]:
    """x[pair // per_row] times each weight, in `tile.splits` parts of their sums.

    Args:
      x: [R, K], bfloat16; float16 for a trellis, in its basis.
      planes: weights of this spec.
      member: int32 [tiles], the matrix that each tile meets; -1 is one of zeros, which nothing is read
        of.
      pair: int32 [tiles, tile.rows], see `groups.tiles`.
      pairs: how many there are.
      finish: None, or what is made of the sums of all weights where they are not cut into parts.
      dtype: of what `finish` makes.

    Returns:
      [splits, pairs, N] for each weight in float32, or for what `finish` makes of them; arbitrary for a
      pair that is in no tile.
    """
    names = planes[0].names()
    assert finish is None or tile.splits == 1
    results = len(planes) if finish is None else 1

    def kernel(member_ref: Any, pair_ref: Any, x_ref: Any, *refs: Any) -> None:
        plane_refs, y_refs = refs[:-results], refs[-results:]
        sets = [
            dict(zip(names, plane_refs[i * len(names) :], strict=False)) for i in range(len(planes))
        ]
        group, n0 = pl.program_id(0), pl.program_id(1) * tile.outputs
        at = plgpu.load(member_ref.at[group])
        split = pl.program_id(2)
        none = jnp.zeros((), jnp.int32)
        first, last = steps_of(split, spec.words, tile)
        steps = (none + first, jnp.where(at < 0, none + first, last))
        at = jnp.maximum(at, 0)
        chosen = plgpu.load(pair_ref.at[group, pl.ds(0, tile.rows)])
        inside = chosen >= 0
        rows = jnp.where(inside, chosen // per_row, 0)
        x_tile = Rows(x_ref, rows, inside, tile.words)
        sums = contract(spec, sets, at, n0, steps, x_tile, tile, interpret)
        sums = [whole_scale(spec, refs, at, s) for refs, s in zip(sets, sums, strict=True)]
        made = sums if finish is None else [finish(*sums)]
        outputs = n0 + jnp.arange(tile.outputs, dtype=jnp.int32)
        mask = inside[:, None] & (outputs < spec.rows)[None, :]
        where = (jnp.where(inside, chosen, pairs)[:, None], outputs[None, :])
        place = tuple(jnp.broadcast_to(i, mask.shape) for i in (split, *where))
        for y, y_ref in zip(made, y_refs, strict=True):
            plgpu.store(y_ref.at[place], y.T.astype(y_ref.dtype), mask=mask)

    whole = pl.BlockSpec(memory_space=pl.ANY)
    # Interpreted, a masked store writes back what was there: places of its own keep it away.
    shape = jax.ShapeDtypeStruct((tile.splits, pairs + interpret, spec.rows), dtype)
    found = pl.pallas_call(
        kernel,
        name=f"experts_{spec.code}",
        out_shape=[shape] * results,
        grid=(member.shape[0], -(-spec.rows // tile.outputs), tile.splits),
        in_specs=[whole] * (3 + len(names) * len(planes)),
        out_specs=[whole] * results,
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
    )(member, pair, by_field(x, spec), *(a for p in planes for a in p.arrays()))
    return [y[:, :pairs] for y in found]
