"""`linear` for weights in a rotated basis (EXL3): x is rotated, multiplied, and the result rotated back.

    y = ((x diag(in_scale)) H T H) diag(out_scale)

H is block diagonal, 128 x 128 with entries +-1 / sqrt(128). Rotated rows of x are float16 under a power
of two of each row's own, so that no value overflows; T is float16 as decoded; sums are float32.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from ...weights.formats.exl3 import ROTATION
from .. import pallas
from .planes import Planes, Spec

ROWS = 16
"""Rows of x in a program."""
LARGEST = 8
"""Powers of two up to which scaled inputs reach; rotated they are below 2^12."""


def padded(spec: Spec) -> Spec:
    """The spec in whole blocks of the rotation, as the trellis is."""
    rows, cols = (-(-size // ROTATION) * ROTATION for size in (spec.rows, spec.cols))
    return dataclasses.replace(spec, rows=rows, cols=cols)


def into(
    x: jax.Array, planes: Planes, member: jax.Array, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """Rows of x in the weight's basis.

    Args:
      x: bfloat16 [R, K].
      member: int32 [1].

    Returns:
      (float16 [R, K padded], float32 [R] that results are to be multiplied by).
    """
    assert planes.in_scale is not None
    count, k = x.shape
    width = planes.in_scale.shape[-1]
    scale = planes.in_scale[member[0], :k].astype(jnp.float32)
    most = jnp.max(jnp.abs(x.astype(jnp.float32) * scale), axis=1)
    # The exponent's distance from LARGEST, as powers of two whose inverses are normal numbers too.
    power = LARGEST + 127 - (lax.bitcast_convert_type(most, jnp.int32) >> 23)
    power = jnp.clip(power, -100, 100)
    factor, back = (lax.bitcast_convert_type((127 + p) << 23, jnp.float32) for p in (power, -power))

    def kernel(member_ref: Any, x_ref: Any, scale_ref: Any, factor_ref: Any, out_ref: Any) -> None:
        rows, inside, column = _place(count)
        mask = inside[:, None] & (column < k)[None, :]
        where = _cells(rows, jnp.minimum(column, k - 1))
        values = plgpu.load(x_ref.at[where], mask=mask, other=jnp.zeros((), x.dtype))
        values = values.astype(jnp.float32) * _at(scale_ref, member_ref, column)[None, :]
        values = values * plgpu.load(factor_ref.at[rows])[:, None]
        rotated = _times_hadamard(values, interpret).astype(jnp.float16)
        mask = jnp.broadcast_to(inside[:, None], mask.shape)
        row, at = _cells(jnp.where(inside, rows, count), column)
        plgpu.store(out_ref.at[row, at], rotated, mask=mask)

    # Interpreted, a masked store writes back what was there: a row of its own keeps it away.
    out = pallas.call(
        kernel,
        _grid(count, width),
        jax.ShapeDtypeStruct((count + interpret, width), jnp.float16),
        interpret=interpret,
        name="rotate_inputs",
    )(member, x, planes.in_scale, factor)[:count]
    return out, back


def back(
    spec: Spec,
    parts: jax.Array,
    planes: Planes,
    member: jax.Array,
    factor: jax.Array,
    dtype: Any,
    interpret: bool,
) -> jax.Array:
    """Sums in the weight's basis as outputs.

    Args:
      parts: float32 [parts, R, N padded], added in their order.
      factor: float32 [R], from `into`.

    Returns:
      dtype [R, N].
    """
    splits, count, width = parts.shape
    n = spec.rows

    def kernel(
        member_ref: Any, parts_ref: Any, scale_ref: Any, factor_ref: Any, y_ref: Any
    ) -> None:
        rows, inside, column = _place(count)
        shape = (ROWS, ROTATION)
        total = jnp.zeros(shape, jnp.float32)
        for i in range(splits):
            index = (jnp.int32(i), rows[:, None], column[None, :])
            part = plgpu.load(parts_ref.at[tuple(jnp.broadcast_to(j, shape) for j in index)])
            total = part if i == 0 else total + part
        values = _times_hadamard(total, interpret) * _at(scale_ref, member_ref, column)[None, :]
        values = values * plgpu.load(factor_ref.at[rows])[:, None]
        mask = inside[:, None] & (column < n)[None, :]
        row, at = _cells(rows, column)
        view = y_ref.at[jnp.where(mask, row, count), jnp.where(mask, at, 0)]
        plgpu.store(view, values.astype(dtype), mask=mask)

    return pallas.call(
        kernel,
        _grid(count, width),
        jax.ShapeDtypeStruct((count + interpret, n), dtype),
        interpret=interpret,
        name="rotate_outputs",
    )(member, parts, planes.out_scale, factor)[:count]


def _grid(count: int, width: int) -> tuple[int, int]:
    return -(-count // ROWS), width // ROTATION


def _place(count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """This program's rows (clamped), whether they are there, and its columns."""
    rows = pl.program_id(0) * ROWS + jnp.arange(ROWS, dtype=jnp.int32)
    column = pl.program_id(1) * ROTATION + jnp.arange(ROTATION, dtype=jnp.int32)
    return jnp.minimum(rows, count - 1), rows < count, column


def _cells(rows: jax.Array, column: jax.Array) -> tuple[jax.Array, jax.Array]:
    shape = (rows.shape[0], column.shape[0])
    return jnp.broadcast_to(rows[:, None], shape), jnp.broadcast_to(column[None, :], shape)


def _at(scale_ref: Any, member_ref: Any, column: jax.Array) -> jax.Array:
    """float32 [128]: a member's scales of these columns."""
    member = plgpu.load(member_ref.at[jnp.zeros(column.shape, jnp.int32)])
    return plgpu.load(scale_ref.at[member, column]).astype(jnp.float32)


def _times_hadamard(values: jax.Array, interpret: bool) -> jax.Array:
    """float32 [rows, 128] times H."""
    place = jnp.arange(ROTATION, dtype=jnp.int32)
    both = place[:, None] & place[None, :]
    for by in (4, 2, 1):
        both = both ^ both >> by
    sign = (1 - 2 * (both & 1)).astype(jnp.float32)
    # Products with +-1, exact in the three TF32 parts of a float32.
    exact = pallas.precision(jnp.float32, interpret)
    return pallas.dot(values, sign, exact) * jnp.float32(ROTATION**-0.5)
