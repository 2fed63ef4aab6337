"""`linear` as a Pallas Triton kernel that multiplies by packed weights as they are.

See tile.py for the loop, tuning.py for sizes and panels.py for many rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from ...weights.formats.base import COLS
from ...weights.formats.cover import Covered
from . import cover, panels, rotated, tuning
from .planes import Planes, Spec, planes_of, spec_of
from .tile import Tile, contract, whole_scale


def supports(x: Any, w: Any) -> str | None:
    """None if `linear` can take these, else the reason."""
    if x.dtype != jnp.bfloat16:
        return f"activations of {x.dtype}; bfloat16 is supported"
    spec = cover.spec_below(w)
    return spec if isinstance(spec, str) else None


def linear(
    x: jax.Array,
    w: Any,
    layer: Any = None,
    rows: jax.Array | None = None,
    *,
    dtype: Any = jnp.bfloat16,
    tile: Tile | None = None,
    interpret: bool = False,
) -> jax.Array:
    """y[..., n] = sum_k x[..., k] W[layer, n, k], summed in float32.

    Args:
      x: bfloat16 [..., K].
      w: a weight that `supports` takes, [L, N, K] or [N, K].
      layer: int or int32 [], the index into L; None for a weight without an L axis.
      rows: not looked at.
      dtype: of the result, bfloat16 or float32.
      tile: other sizes than those of the table.
      interpret: run on a CPU, slowly.

    Returns:
      dtype [..., N]. For up to `tuning.DECODE_ROWS` rows a row's bits depend on nothing but the
      row and the weight.

    Raises:
      ValueError: a weight that is not supported, or another K.
    """
    del rows
    if x.shape[-1] != w.shape[-1]:
        raise ValueError(f"linear: x has {x.shape[-1]} columns, the weight {w.shape[-1]}")
    flat = x.reshape(-1, x.shape[-1])
    member = jnp.asarray(0 if layer is None else layer, jnp.int32).reshape(1)
    if isinstance(w, Covered):
        index, inner = cover.places(w, member), w.inner
        if w.axis == COLS:
            flat = cover.spread(flat, index, inner.shape[COLS])
        y = linear(flat, inner, layer, dtype=dtype, tile=tile, interpret=interpret)
        y = y if w.axis == COLS else cover.taken(y, index)
        return y.reshape(*x.shape[:-1], w.rows)
    spec = spec_of(w)
    if isinstance(spec, str):
        raise ValueError(f"linear: {spec}")
    planes, many = planes_of(w), tile is None and flat.shape[0] > tuning.DECODE_ROWS
    if spec.ordered:
        assert planes.order is not None
        flat = flat[:, planes.order[member[0]]]
    if spec.code == "trellis":
        y = _rotated(spec, flat, planes, member, tile, many, dtype, interpret)
    elif many:
        y = panels.linear(spec, flat, planes, member, *tuning.many(spec), interpret, dtype)
    else:
        tile = tile or tuning.tile_for(spec, flat.shape[0])
        y = launch(spec, flat, planes, member, tile, interpret, dtype=dtype)
    return y.reshape(*x.shape[:-1], spec.rows)


def by_field(x: jax.Array, spec: Spec) -> jax.Array:
    """[R, K] -> [fields, R, K / fields]: the inputs that each field of the elements meets."""
    if spec.fields == 1:
        return x[None]
    runs = x.reshape(x.shape[0], -1, spec.fields, spec.run)
    return runs.transpose(2, 0, 1, 3).reshape(spec.fields, x.shape[0], -1)


@dataclasses.dataclass(frozen=True)
class Rows:
    """`contract`'s x_tile: some rows of x.

    Attributes:
      ref: [fields, R, elements], see `by_field`.
      rows: int32 [tile.rows], which rows of x; where `inside` is False zeros are read.
      width: elements of a tile.
    """

    ref: Any
    rows: jax.Array
    inside: jax.Array | None
    width: int

    def __call__(self, field: int, w0: jax.Array) -> jax.Array:
        """[rows, width], the inputs that a field of the elements from w0 on meets."""
        end = self.ref.shape[-1]
        shape = (self.rows.shape[0], self.width)
        column = w0 + jnp.arange(self.width, dtype=jnp.int32)
        mask = None if self.inside is None else self.inside[:, None]
        if end % self.width:
            within = (column < end)[None, :]
            mask = within if mask is None else mask & within
        return self._load(shape, jnp.int32(field), self.rows[:, None], column[None, :], mask)

    def at(self, column: jax.Array) -> jax.Array:
        """float32 [n, rows], the inputs `column` (int32 [n])."""
        fields = self.ref.shape[0]
        shape = (column.shape[0], self.rows.shape[0])
        mask = None if self.inside is None else self.inside[None, :]
        column = column[:, None]
        found = self._load(shape, column % fields, self.rows[None, :], column // fields, mask)
        return found.astype(jnp.float32)

    def _load(
        self, shape: tuple[int, int], field: Any, row: Any, column: Any, mask: Any
    ) -> jax.Array:
        view = self.ref.at[tuple(jnp.broadcast_to(i, shape) for i in (field, row, column))]
        if mask is None:
            return plgpu.load(view)
        other = jnp.zeros((), self.ref.dtype)
        return plgpu.load(view, mask=jnp.broadcast_to(mask, shape), other=other)


def steps_of(split: jax.Array, words: int, tile: Tile) -> tuple[Any, Any]:
    """First and last (exclusive) step of a split."""
    total = -(-words // tile.words)
    if tile.splits == 1:
        return 0, total
    each = -(-total // tile.splits)
    return split * each, jnp.minimum((split + 1) * each, total)


def _rotated(
    spec: Spec,
    x: jax.Array,
    planes: Planes,
    member: jax.Array,
    tile: Tile | None,
    many: bool,
    dtype: Any,
    interpret: bool,
) -> jax.Array:
    """A weight in a rotated basis, see rotated.py."""
    x, most = rotated.into(x, planes, member, interpret)
    whole = rotated.padded(spec)
    if many:
        sizes = tuning.many(whole)
        parts = panels.linear(whole, x, planes, member, *sizes, interpret, jnp.float32)[None]
    else:
        tile = tile or tuning.tile_for(whole, x.shape[0])
        parts = _parts(whole, x[None], planes, member, tile, jnp.float32, interpret)
    return rotated.back(spec, parts, planes, member, most, dtype, interpret)


def launch(
    spec: Spec,
    x: jax.Array,
    planes: Planes,
    member: jax.Array,
    tile: Tile,
    interpret: bool,
    groups: int = 1,
    dtype: Any = jnp.bfloat16,
) -> jax.Array:
    """dtype [R, N] for up to `tuning.DECODE_ROWS` rows R.

    Args:
      x: [R * groups, K], a row's groups one after the other; group g meets the outputs g N / groups
        and on, and no tile's outputs belong to two groups.
    """
    each = dtype if tile.splits == 1 else jnp.float32
    parts = _parts(spec, by_field(x, spec), planes, member, tile, each, interpret, groups)
    if tile.splits == 1:
        return parts[0]
    total = in_order(parts)
    if spec.whole:
        assert planes.whole is not None
        scale = planes.whole[member[0]]
        total = total * scale if spec.whole == "times" else total / scale
    return total.astype(dtype)


def _parts(
    spec: Spec,
    x: jax.Array,
    planes: Planes,
    member: jax.Array,
    tile: Tile,
    dtype: Any,
    interpret: bool,
    groups: int = 1,
) -> jax.Array:
    """dtype [splits, R, N]: what each split sums up. x is as `by_field` gives it."""
    count = x.shape[1] // groups
    names = planes.names()

    def kernel(member_ref: Any, x_ref: Any, *refs: Any) -> None:
        *plane_refs, y_ref = refs
        weight = dict(zip(names, plane_refs, strict=True))
        r0, n0 = pl.program_id(0) * tile.rows, pl.program_id(1) * tile.outputs
        split, at = pl.program_id(2), plgpu.load(member_ref.at[jnp.zeros((), jnp.int32)])
        rows = r0 + jnp.arange(tile.rows, dtype=jnp.int32)
        inside = rows < count if count % tile.rows else None
        places = rows if groups == 1 else rows * groups + n0 // (spec.rows // groups)
        [sums] = contract(
            spec, [weight], at, n0, steps_of(split, spec.words, tile),
            Rows(x_ref, places, inside, tile.words), tile, interpret,
        )  # fmt: skip
        if tile.splits == 1:
            sums = whole_scale(spec, weight, at, sums)
        outputs = n0 + jnp.arange(tile.outputs, dtype=jnp.int32)
        mask = (rows < count)[:, None] & (outputs < spec.rows)[None, :]
        view = y_ref.at[split, pl.ds(r0, tile.rows), pl.ds(n0, tile.outputs)]
        plgpu.store(view, sums.T.astype(y_ref.dtype), mask=mask)

    return pl.pallas_call(
        kernel,
        name=f"{'linear' if groups == 1 else 'grouped'}_{spec.code}",
        out_shape=jax.ShapeDtypeStruct((tile.splits, count, spec.rows), dtype),
        grid=(-(-count // tile.rows), -(-spec.rows // tile.outputs), tile.splits),
        in_specs=[_ANY] * (2 + len(names)),
        out_specs=_ANY,
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
    )(member, x, *planes.arrays())


def in_order(parts: Sequence[jax.Array] | jax.Array) -> jax.Array:
    """The sum of parts[0], parts[1], ... in this order, whatever their shape."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


_ANY = pl.BlockSpec(memory_space=pl.ANY)
