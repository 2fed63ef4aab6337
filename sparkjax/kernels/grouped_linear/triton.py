"""Projections side by side as a Pallas Triton kernel over the packed weight, for decode.

The loop is that of `kernels/linear`; a block of threads takes outputs of one group, and that group's
inputs. With more rows the reference decodes the weight once for all of them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from ..linear import triton as linear
from ..linear import tuning
from ..linear.planes import Spec, planes_of, spec_of
from ..linear.tile import contract, whole_scale


def supports(x: Any, w: Any) -> str | None:
    """None if `grouped` can take these, else the reason."""
    if reason := linear.supports(x, w):
        return reason
    *lead, groups, _ = x.shape
    count = 1
    for size in lead:
        count *= size
    if count > tuning.DECODE_ROWS:
        return f"{count} rows; up to {tuning.DECODE_ROWS} are supported"
    spec = spec_of(w)
    assert isinstance(spec, Spec)
    if spec.prepared:
        return "weights whose inputs are rotated or sorted"
    outputs = tuning.tile_for(spec, count).outputs
    if spec.rows % (groups * outputs):
        return f"{groups} groups of {spec.rows} outputs; multiples of {outputs} are supported"
    return None


def grouped(x: jax.Array, w: Any, layer: Any = None, *, interpret: bool = False) -> jax.Array:
    """See `reference.grouped`; x is bfloat16, and a row's bits depend on nothing but the row and the
    weight.

    Raises:
      ValueError: what is not supported.
    """
    if reason := supports(x, w):
        raise ValueError(f"grouped: {reason}")
    spec, planes = spec_of(w), planes_of(w)
    assert isinstance(spec, Spec)
    *lead, groups, k = x.shape
    flat = linear.by_field(x.reshape(-1, k), spec)
    count = flat.shape[1] // groups
    tile, names = tuning.tile_for(spec, count), planes.names()

    def kernel(member_ref: Any, x_ref: Any, *refs: Any) -> None:
        *plane_refs, y_ref = refs
        weight = dict(zip(names, plane_refs, strict=True))
        r0, n0 = pl.program_id(0) * tile.rows, pl.program_id(1) * tile.outputs
        split, at = pl.program_id(2), plgpu.load(member_ref.at[jnp.zeros((), jnp.int32)])
        row = r0 + jnp.arange(tile.rows, dtype=jnp.int32)
        inside = row < count if count % tile.rows else None
        rows = row * groups + n0 // (spec.rows // groups)
        [sums] = contract(
            spec, [weight], at, n0, linear.steps_of(split, spec.words, tile),
            linear.Rows(x_ref, rows, inside, tile.words), tile, interpret,
        )  # fmt: skip
        sums = whole_scale(spec, weight, at, sums)
        mask = jnp.broadcast_to((row < count)[:, None], (tile.rows, tile.outputs))
        view = y_ref.at[split, pl.ds(r0, tile.rows), pl.ds(n0, tile.outputs)]
        plgpu.store(view, sums.T.astype(y_ref.dtype), mask=mask)

    whole = pl.BlockSpec(memory_space=pl.ANY)
    parts = pl.pallas_call(
        kernel,
        name=f"grouped_{spec.code}",
        out_shape=jax.ShapeDtypeStruct(
            (tile.splits, count, spec.rows), x.dtype if tile.splits == 1 else jnp.float32
        ),
        grid=(-(-count // tile.rows), spec.rows // tile.outputs, tile.splits),
        in_specs=[whole] * (2 + len(names)),
        out_specs=whole,
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
    )(jnp.asarray(0 if layer is None else layer, jnp.int32).reshape(1), flat, *planes.arrays())
    y = linear.in_order(parts).astype(x.dtype)
    return y.reshape(*lead, groups, spec.rows // groups)
