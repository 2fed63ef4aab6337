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
from ..linear.triton import Rows, by_field


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
    """finish(x[pair // per_row] times each weight), for every pair of a tile.

    Args:
      x: [R, K], bfloat16; float16 for a trellis, in its basis.
      planes: weights of this spec.
      member: int32 [tiles], the matrix that each tile meets; -1 is one of zeros, which nothing is read
        of.
      pair: int32 [tiles, tile.rows], see `groups.tiles`.
      pairs: how many there are.

    Returns:
      dtype [pairs, N]; arbitrary for a pair that is in no tile.
    """
    names = planes[0].names()
    total = -(-spec.words // tile.words)

    def kernel(member_ref: Any, pair_ref: Any, x_ref: Any, *refs: Any) -> None:
        *plane_refs, y_ref = refs
        sets = [
            dict(zip(names, plane_refs[i * len(names) :], strict=False)) for i in range(len(planes))
        ]
        group, n0 = pl.program_id(0), pl.program_id(1) * tile.outputs
        at = plgpu.load(member_ref.at[group])
        none = jnp.zeros((), jnp.int32)
        steps = (none, jnp.where(at < 0, none, total))
        at = jnp.maximum(at, 0)
        chosen = plgpu.load(pair_ref.at[group, pl.ds(0, tile.rows)])
        inside = chosen >= 0
        rows = jnp.where(inside, chosen // per_row, 0)
        x_tile = Rows(x_ref, rows, inside, tile.words)
        sums = contract(spec, sets, at, n0, steps, x_tile, tile, interpret)
        sums = [whole_scale(spec, refs, at, s) for refs, s in zip(sets, sums, strict=True)]
        y = finish(*sums).T.astype(y_ref.dtype)
        outputs = n0 + jnp.arange(tile.outputs, dtype=jnp.int32)
        mask = inside[:, None] & (outputs < spec.rows)[None, :]
        where = (jnp.where(inside, chosen, pairs)[:, None], outputs[None, :])
        view = y_ref.at[tuple(jnp.broadcast_to(i, mask.shape) for i in where)]
        plgpu.store(view, y, mask=mask)

    whole = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        kernel,
        name=f"experts_{spec.code}",
        # Interpreted, a masked store writes back what was there: places of its own keep it away.
        out_shape=jax.ShapeDtypeStruct((pairs + interpret, spec.rows), dtype),
        grid=(member.shape[0], -(-spec.rows // tile.outputs)),
        in_specs=[whole] * (3 + len(names) * len(planes)),
        out_specs=whole,
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
    )(member, pair, by_field(x, spec), *(a for p in planes for a in p.arrays()))[:pairs]
