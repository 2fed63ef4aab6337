"""Products with weights in a rotated basis (EXL3): x is rotated, multiplied, and the result rotated back.

    y = ((x diag(in_scale)) H T H) diag(out_scale)

H is block diagonal, 128 x 128 with entries +-1 / sqrt(128). Rotated rows of x are float16 under a power
of two of each row's own, so that no value overflows; T is float16 as decoded; sums are float32. Rows may
belong to one matrix or (experts) each to its own.
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
"""Rows that a program rotates."""
LARGEST = 8
"""Powers of two up to which scaled inputs reach; rotated they are below 2^12."""


def padded(spec: Spec) -> Spec:
    """The spec in whole blocks of the rotation, as the trellis is."""
    rows, cols = (-(-size // ROTATION) * ROTATION for size in (spec.rows, spec.cols))
    return dataclasses.replace(spec, rows=rows, cols=cols)


def into(
    x: jax.Array, planes: Planes, member: jax.Array, interpret: bool, per: int = 1
) -> tuple[jax.Array, jax.Array]:
    """Rows of x in their weights' bases.

    Args:
      x: bfloat16 or float32 [R, K].
      member: int32, the matrix of all rows [1], or of each row of the result [R * per].
      per: rows of the result for one of x, side by side.

    Returns:
      (float16 [R * per, K padded], float32 [R * per]: the largest scaled input of each row, which its
      power of two follows from).
    """
    assert planes.in_scale is not None
    count, k = x.shape[0] * per, x.shape[1]
    width = planes.in_scale.shape[-1]
    scale = planes.in_scale[member, :k].astype(jnp.float32)
    each = x.astype(jnp.float32) if per == 1 else jnp.repeat(x.astype(jnp.float32), per, axis=0)
    most = jnp.max(jnp.abs(each * scale), axis=1)

    def kernel(member_ref: Any, x_ref: Any, scale_ref: Any, most_ref: Any, out_ref: Any) -> None:
        rows = pl.program_id(0) * ROWS + jnp.arange(ROWS, dtype=jnp.int32)
        inside, rows, column = rows < count, jnp.minimum(rows, count - 1), _columns()
        mask = inside[:, None] & (column < k)[None, :]
        where = _cells(rows // per, jnp.minimum(column, k - 1))
        values = plgpu.load(x_ref.at[where], mask=mask, other=jnp.zeros((), x.dtype))
        values = values.astype(jnp.float32) * _scales(scale_ref, member_ref, rows, column)
        values = values * _two_to(_power(plgpu.load(most_ref.at[rows])))[:, None]
        rotated = _times_hadamard(values, interpret).astype(jnp.float16)
        mask = jnp.broadcast_to(inside[:, None], mask.shape)
        row, at = _cells(jnp.where(inside, rows, count), column)
        plgpu.store(out_ref.at[row, at], rotated, mask=mask)

    # Interpreted, a masked store writes back what was there: a row of its own keeps it away.
    out = pallas.call(
        kernel,
        (-(-count // ROWS), width // ROTATION),
        jax.ShapeDtypeStruct((count + interpret, width), jnp.float16),
        interpret=interpret,
        name="rotate_inputs",
    )(member, x, planes.in_scale, most)[:count]
    return out, most


def back(
    spec: Spec,
    parts: jax.Array,
    planes: Planes,
    member: jax.Array,
    most: jax.Array,
    dtype: Any,
    interpret: bool,
    share: jax.Array | None = None,
) -> jax.Array:
    """Sums in the weights' bases as outputs.

    Args:
      parts: float32 [parts, R * per, N padded], added in their order.
      member: int32, the matrix of all rows [1], or of each [R * per].
      most: float32 [R * per], from `into`.
      share: None, where `per` is one; or float32 [R, per], the weights under which neighbouring rows are
        added, in an order that `per` alone decides.

    Returns:
      dtype [R, N].
    """
    per = 1 if share is None else share.shape[1]
    splits, total, width = parts.shape
    count, n = total // per, spec.rows
    slots = pallas.power(per)
    held = max(ROWS // slots, 1)

    def kernel(
        member_ref: Any, parts_ref: Any, scale_ref: Any, most_ref: Any, *refs: Any
    ) -> None:
        *share_ref, y_ref = refs
        place = jnp.arange(held * slots, dtype=jnp.int32)
        owner, slot = pl.program_id(0) * held + place // slots, place % slots
        inside, column = (owner < count) & (slot < per), _columns()
        rows = jnp.where(inside, owner * per + slot, 0)
        shape = (held * slots, ROTATION)
        sums = jnp.zeros(shape, jnp.float32)
        for i in range(splits):
            index = (jnp.int32(i), rows[:, None], column[None, :])
            part = plgpu.load(parts_ref.at[tuple(jnp.broadcast_to(j, shape) for j in index)])
            sums = part if i == 0 else sums + part
        values = _times_hadamard(sums, interpret) * _scales(scale_ref, member_ref, rows, column)
        values = values * _two_to(-_power(plgpu.load(most_ref.at[rows])))[:, None]
        if share_ref:
            weight = plgpu.load(share_ref[0].at[rows // per, rows % per])
            values = jnp.where(inside[:, None], values * weight[:, None], 0.0)
            values = values.reshape(held, slots, ROTATION).sum(1)
        rows = pl.program_id(0) * held + jnp.arange(held, dtype=jnp.int32)
        mask = (rows < count)[:, None] & (column < n)[None, :]
        row, at = _cells(rows, column)
        view = y_ref.at[jnp.where(mask, row, count), jnp.where(mask, at, 0)]
        plgpu.store(view, values.astype(dtype), mask=mask)

    return pallas.call(
        kernel,
        (-(-count // held), width // ROTATION),
        jax.ShapeDtypeStruct((count + interpret, n), dtype),
        interpret=interpret,
        name="rotate_outputs",
    )(member, parts, planes.out_scale, most, *([] if share is None else [share]))[:count]


def _power(most: jax.Array) -> jax.Array:
    """int32: the power of two for rows whose largest input this is, one whose inverse is a normal number
    too."""
    power = LARGEST + 127 - (lax.bitcast_convert_type(most, jnp.int32) >> 23)
    return jnp.clip(power, -100, 100)


def _two_to(power: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type((127 + power) << 23, jnp.float32)


def _columns() -> jax.Array:
    """int32 [128]: this program's."""
    return pl.program_id(1) * ROTATION + jnp.arange(ROTATION, dtype=jnp.int32)


def _cells(rows: jax.Array, column: jax.Array) -> tuple[jax.Array, jax.Array]:
    shape = (rows.shape[0], column.shape[0])
    return jnp.broadcast_to(rows[:, None], shape), jnp.broadcast_to(column[None, :], shape)


def _scales(scale_ref: Any, member_ref: Any, rows: jax.Array, column: jax.Array) -> jax.Array:
    """float32 [rows, 128] of each row's matrix; [1, 128] where all have one."""
    which = jnp.zeros(1, jnp.int32) if member_ref.shape[0] == 1 else rows
    where = _cells(plgpu.load(member_ref.at[which]), column)
    return plgpu.load(scale_ref.at[where]).astype(jnp.float32)


def _times_hadamard(values: jax.Array, interpret: bool) -> jax.Array:
    """float32 [rows, 128] times H; products are exact."""
    place = jnp.arange(ROTATION, dtype=jnp.int32)
    both = place[:, None] & place[None, :]
    for by in (4, 2, 1):
        both = both ^ both >> by
    sign = (1 - 2 * (both & 1)).astype(jnp.float32)
    return _times_signs(values, sign, interpret) * jnp.float32(ROTATION**-0.5)


def _times_signs(values: jax.Array, sign: jax.Array, interpret: bool) -> jax.Array:
    """float32 [rows, n] times a float32 matrix of +-1."""
    if interpret:
        # XLA may leave out the roundings of what is below.
        return pallas.dot(values, sign, pallas.precision(jnp.float32, True))
    # A float32 is the sum of three bfloat16.
    rest, total = values, jnp.zeros((values.shape[0], sign.shape[1]), jnp.float32)
    for _ in range(3):
        part = rest.astype(jnp.bfloat16)
        total = total + pallas.dot(part, sign.astype(jnp.bfloat16))
        rest = rest - part.astype(jnp.float32)
    return total
