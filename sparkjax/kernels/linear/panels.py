"""`linear` for many rows: some outputs' weights at a time become bfloat16, then a plain product.

With many rows, decoding weights anew for every tile of rows costs more than the product. A panel of
at most `PANEL` bytes is decoded once into memory (GB10's second-level cache holds it) and multiplied
by all rows, the result going in place into its columns of y.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from . import decode
from .planes import Planes, Spec
from .tile import Outputs, Tile, contract, joined, lowered, whole_scale, woven

PANEL = 32 << 20
"""Bytes of bfloat16 weights that exist at a time."""


def linear(
    spec: Spec,
    x: jax.Array,
    planes: Planes,
    member: jax.Array,
    decoding: Tile,
    product: Tile,
    interpret: bool,
    dtype: Any = jnp.bfloat16,
) -> jax.Array:
    """y[r, n] = sum_k x[r, k] W[member, n, k]; weights are rounded to bfloat16.

    Args:
      x: bfloat16 [R, K]; float16 for a trellis, whose numbers are.
      member: int32 [1].
      decoding, product: tiles of the two kernels.
      dtype: of the result.

    Returns:
      [R, N].
    """
    if spec.code == "bf16":
        return _product(x, planes.words, member, None, 0, spec.rows, product, dtype, interpret)
    most = max(PANEL // (2 * spec.cols) // product.outputs, 1) * product.outputs
    y = None
    for n0 in range(0, spec.rows, most):
        count = min(most, spec.rows - n0)
        panel = decoded(spec, planes, member, n0, count, decoding, interpret)
        zero = jnp.zeros(1, jnp.int32)
        y = _product(x, panel[None], zero, y, n0, spec.rows, product, dtype, interpret)
    assert y is not None
    return y


def decoded(
    spec: Spec,
    planes: Planes,
    member: jax.Array,
    start: int,
    count: int,
    tile: Tile,
    interpret: bool,
) -> jax.Array:
    """Weights of outputs start .. start + count as bfloat16 [count, K], those of a trellis as float16
    in its basis; tile.rows is not used."""
    names = planes.names()
    dtype = jnp.float16 if spec.code == "trellis" else jnp.bfloat16
    width = tile.words * spec.fields

    def kernel(member_ref: Any, *refs: Any) -> None:
        *plane_refs, out_ref = refs
        weight = dict(zip(names, plane_refs, strict=True))
        n0, w0 = pl.program_id(0) * tile.outputs, pl.program_id(1) * tile.words
        at = plgpu.load(member_ref.at[jnp.zeros((), jnp.int32)])
        place = Outputs(spec, at, start + n0, tile)
        form = place.fields(weight, w0, interpret)

        def slot_values(slot: int) -> jax.Array:
            fields = [form(f, slot) for f in range(spec.fields)]
            values = woven(fields)
            if spec.run > 1 and spec.fields > 1:
                values = values.reshape(place.count, -1, spec.run, spec.fields)
                values = values.transpose(0, 1, 3, 2)
            values = values.reshape(place.count, width)
            if spec.block is None and not spec.whole and not spec.lifted:
                return values
            exact = lowered(spec, values.astype(jnp.float32))
            if spec.block is not None:
                scales, _, low = place.numbers(weight, w0)
                exact = exact * scales[slot][:, None]
                exact = exact if low is None else exact + low[:, None]
            return whole_scale(spec, weight, at, exact).astype(jnp.bfloat16)

        values = joined([slot_values(slot) for slot in range(spec.across)])
        outputs = n0 + jnp.arange(tile.outputs, dtype=jnp.int32)
        inputs = w0 * spec.fields + jnp.arange(width, dtype=jnp.int32)
        mask = (outputs < count)[:, None] & (inputs < spec.cols)[None, :]
        view = out_ref.at[pl.ds(n0, tile.outputs), pl.ds(w0 * spec.fields, width)]
        plgpu.store(view, values, mask=mask)

    panel = pl.pallas_call(
        kernel,
        name=f"decode_{spec.code}",
        out_shape=jax.ShapeDtypeStruct((count, spec.cols), dtype),
        grid=(-(-count // tile.outputs), -(-spec.words // tile.words)),
        in_specs=[_ANY] * (1 + len(names)),
        out_specs=_ANY,
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=1),
        interpret=interpret,
    )(member, *planes.arrays())
    return _with_escapes(spec, planes, member[0], start, panel) if spec.escapes else panel


def _with_escapes(
    spec: Spec, planes: Planes, member: jax.Array, start: int, panel: jax.Array
) -> jax.Array:
    """The panel with escaped weights of 12-bit planes in their places."""
    assert planes.places is not None and planes.exponents is not None
    place = planes.places[member]
    row, column = place // spec.cols, place % spec.cols
    low = planes.words[member, row, column // 4] >> (column % 4 * 8).astype(jnp.uint32)
    values = decode.joined(low, planes.exponents[member].astype(jnp.uint32)).astype(jnp.bfloat16)
    # Rows of other panels, and those that fill the list up, are dropped.
    row = jnp.where(row < start, panel.shape[0], row - start)
    return panel.at[row, column].set(values, mode="drop", unique_indices=True)


def _product(
    x: jax.Array,
    w: jax.Array,
    member: jax.Array,
    y: jax.Array | None,
    start: int,
    total: int,
    tile: Tile,
    dtype: Any,
    interpret: bool,
) -> jax.Array:
    """x [R, K] times the transpose of w [M, N, K], into columns start .. start + N of y."""
    count, k = x.shape
    spec = Spec("bf16", w.shape[1], k)
    steps = -(-k // tile.words)

    def kernel(member_ref: Any, x_ref: Any, w_ref: Any, *refs: Any) -> None:
        y_ref = refs[-1]
        r0, n0 = pl.program_id(0) * tile.rows, pl.program_id(1) * tile.outputs
        at = plgpu.load(member_ref.at[jnp.zeros((), jnp.int32)])
        rows = r0 + jnp.arange(tile.rows, dtype=jnp.int32)

        def x_tile(field: int, w0: jax.Array) -> jax.Array:
            view = x_ref.at[pl.ds(r0, tile.rows), pl.ds(w0, tile.words)]
            if count % tile.rows == 0 and k % tile.words == 0:
                return plgpu.load(view)
            columns = w0 + jnp.arange(tile.words, dtype=jnp.int32)
            mask = (rows < count)[:, None] & (columns < k)[None, :]
            return plgpu.load(view, mask=mask, other=jnp.zeros((), x.dtype))

        [sums] = contract(spec, [{"words": w_ref}], at, n0, (0, steps), x_tile, tile, interpret)
        outputs = n0 + jnp.arange(tile.outputs, dtype=jnp.int32)
        mask = (rows < count)[:, None] & (outputs < spec.rows)[None, :]
        view = y_ref.at[pl.ds(r0, tile.rows), pl.ds(start + n0, tile.outputs)]
        plgpu.store(view, sums.T.astype(y_ref.dtype), mask=mask)

    return pl.pallas_call(
        kernel,
        name="linear_rows",
        out_shape=jax.ShapeDtypeStruct((count, total), dtype),
        grid=(-(-count // tile.rows), -(-spec.rows // tile.outputs)),
        in_specs=[_ANY] * (3 + (y is not None)),
        out_specs=_ANY,
        input_output_aliases={} if y is None else {3: 0},
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
    )(member, x, w, *([] if y is None else [y]))


_ANY = pl.BlockSpec(memory_space=pl.ANY)
