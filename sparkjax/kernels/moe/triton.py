"""The expert layer in two Pallas Triton kernels over packed weights, from one row to thousands.

Pairs (token, choice) of one expert share a tile; the first kernel computes act(gate x) * up x for
each tile, the second the down projection; a token's choices are then added in their order. Only
experts that somebody chose are read. The inner loop is that of `kernels/linear/tile.py`, so a
row's result does not depend on its company.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from ..linear import tuning
from ..linear.planes import Planes, Spec, planes_of, spec_of
from ..linear.tile import Tile, contract, whole_scale
from ..linear.triton import Rows, by_field, in_order
from .groups import tiles


def supports(x: Any, gate: Any, up: Any, down: Any) -> str | None:
    """None if `experts` can take these, else the reason."""
    if x.dtype != jnp.bfloat16:
        return f"activations of {x.dtype}; bfloat16 is supported"
    specs = [spec_of(w) for w in (gate, up, down)]
    for spec in specs:
        if isinstance(spec, str):
            return spec
        if spec.prepared:
            return "weights whose inputs are rotated or sorted, each in its own way"
    if specs[0] != specs[1]:
        return "gate and up in different formats"
    return None


def experts(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    gate: Any,
    up: Any,
    down: Any,
    layer: Any,
    activation: Callable[[jax.Array], jax.Array],
    limit: float | None = None,
    *,
    sizes: tuple[Tile, Tile] | None = None,
    interpret: bool = False,
) -> jax.Array:
    """See `reference.experts`; x is bfloat16, act(gate x) * up x is rounded once, and a token's
    choices are added in their order.

    Args:
      sizes: other tiles than those of the table, for gate and up and for down.
      interpret: run on a CPU, slowly.

    Raises:
      ValueError: formats that are not supported.
    """
    reason = supports(x, gate, up, down)
    if reason is not None:
        raise ValueError(f"experts: {reason}")
    into, out = spec_of(gate), spec_of(down)
    assert isinstance(into, Spec) and isinstance(out, Spec)
    tokens, k = ids.shape
    count = gate.shape[1]
    first, second = sizes or tuning.expert_tiles(into, out, tokens, k, count)
    expert, pair = tiles(ids, count, first.rows)
    base = jnp.asarray(layer, jnp.int32) * count
    member = jnp.where(expert < 0, -1, base + expert)
    pairs = tokens * k

    def act(g: jax.Array, u: jax.Array) -> jax.Array:
        if limit is not None:
            g, u = jnp.minimum(g, limit), jnp.clip(u, -limit, limit)
        return activation(g) * u

    planes = [planes_of(gate), planes_of(up)]
    hidden = _launch(into, x, planes, member, pair, k, pairs, act, x.dtype, first, interpret)
    each = _launch(
        out, hidden, [planes_of(down)], member, pair, 1, pairs, lambda y: y, jnp.float32, second,
        interpret,
    )  # fmt: skip
    each = each.reshape(tokens, k, out.rows)
    return in_order([weights[:, j, None] * each[:, j] for j in range(k)]).astype(x.dtype)


def _launch(
    spec: Spec,
    x: jax.Array,
    planes: list[Planes],
    member: jax.Array,
    pair: jax.Array,
    per_row: int,
    pairs: int,
    finish: Callable[..., jax.Array],
    dtype: Any,
    tile: Tile,
    interpret: bool,
) -> jax.Array:
    """finish(x[pair // per_row] times each weight), for every pair: dtype [pairs, N]."""
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
