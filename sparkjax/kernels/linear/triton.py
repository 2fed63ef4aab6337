"""`linear` as a Pallas Triton kernel that multiplies by packed weights as they are.

See tile.py for the loop, tuning.py for sizes and panels.py for many rows.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from functools import partial
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


def linear_group(
    x: jax.Array, weights: Sequence[Any], layer: Any = None, *, interpret: bool = False
) -> list[jax.Array]:
    """`linear` of one x with several weights, to the bit: one launch for those that are alike but for
    their outputs, as long as there are no more rows than decode has.

    Args:
      weights: [L, N, K] each (or [N, K]) with their own N.
    """
    few = x.size // x.shape[-1] <= tuning.DECODE_ROWS
    alike: dict[Any, list[int]] = {}
    for i, w in enumerate(weights):
        spec = None if isinstance(w, Covered) else spec_of(w)
        kind: Any = i
        if few and isinstance(spec, Spec) and not spec.prepared:
            kind = dataclasses.replace(spec, rows=0)
        alike.setdefault(kind, []).append(i)
    found: dict[int, jax.Array] = {}
    for members in alike.values():
        if len(members) == 1:
            [i] = members
            found[i] = linear(x, weights[i], layer, interpret=interpret)
            continue
        some = [weights[i] for i in members]
        assert all(w.shape[-1] == x.shape[-1] for w in some)
        found |= zip(members, _together(x, some, layer, interpret), strict=True)
    return [found[i] for i in range(len(weights))]


def _together(
    x: jax.Array, weights: Sequence[Any], layer: Any, interpret: bool
) -> list[jax.Array]:
    """`linear_group` of weights of one Spec but for the outputs."""
    flat = x.reshape(-1, x.shape[-1])
    member = jnp.asarray(0 if layer is None else layer, jnp.int32).reshape(1)
    shares = []
    for w in weights:
        spec = spec_of(w)
        assert isinstance(spec, Spec)
        shares.append(Share(spec, planes_of(w), tuning.tile_for(spec, flat.shape[0])))
    rows = _parts(by_field(flat, shares[0].spec), member, shares, x.dtype, interpret)
    return [
        _summed(share, parts, member, x.dtype).reshape(*x.shape[:-1], share.spec.rows)
        for share, parts in zip(shares, rows, strict=True)
    ]


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
        [parts] = _parts(x[None], member, [Share(whole, planes, tile)], jnp.float32, interpret)
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
    share = Share(spec, planes, tile)
    [parts] = _parts(by_field(x, spec), member, [share], dtype, interpret, groups)
    return _summed(share, parts, member, dtype)


def _summed(share: Share, parts: jax.Array, member: jax.Array, dtype: Any) -> jax.Array:
    """dtype [R, N] of a weight's `_parts`."""
    if share.tile.splits == 1:
        return parts[0]
    total, spec = in_order(parts), share.spec
    if spec.whole:
        assert share.planes.whole is not None
        scale = share.planes.whole[member[0]]
        total = total * scale if spec.whole == "times" else total / scale
    return total.astype(dtype)


@dataclasses.dataclass(frozen=True)
class Share:
    """One weight of a launch."""

    spec: Spec
    planes: Planes
    tile: Tile

    @property
    def across(self) -> int:
        """Tiles of outputs."""
        return -(-self.spec.rows // self.tile.outputs)


def _parts(
    x: jax.Array,
    member: jax.Array,
    shares: Sequence[Share],
    dtype: Any,
    interpret: bool,
    groups: int = 1,
) -> list[jax.Array]:
    """[splits, R, N] of each weight: what each split sums up, of `dtype` where there is one, float32
    where there are more. x is as `by_field` gives it; tiles differ in splits only."""
    count = x.shape[1] // groups
    names = shares[0].planes.names()
    first = shares[0].tile
    starts = [0, *itertools.accumulate(s.across * s.tile.splits for s in shares)]

    def one(
        share: Share, row: jax.Array, place: jax.Array, at: jax.Array, x_ref: Any, planes: Any, y_ref: Any
    ) -> None:
        spec, tile = share.spec, share.tile
        r0, n0 = row * tile.rows, place % share.across * tile.outputs
        split = place // share.across
        weight = dict(zip(names, planes, strict=True))
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

    def kernel(member_ref: Any, x_ref: Any, *refs: Any) -> None:
        row, place = pl.program_id(0), pl.program_id(1)
        at = plgpu.load(member_ref.at[jnp.zeros((), jnp.int32)])
        for i, share in enumerate(shares):
            planes = refs[i * len(names) : (i + 1) * len(names)]
            y_ref = refs[i - len(shares)]
            work = partial(one, share, row, place - starts[i], at, x_ref, planes, y_ref)
            if len(shares) == 1:
                work()
            else:
                pl.when((place >= starts[i]) & (place < starts[i + 1]))(work)

    return pl.pallas_call(
        kernel,
        name=f"{'linear' if groups == 1 else 'grouped'}_{shares[0].spec.code}",
        out_shape=[
            jax.ShapeDtypeStruct(
                (s.tile.splits, count, s.spec.rows), dtype if s.tile.splits == 1 else jnp.float32
            )
            for s in shares
        ],
        grid=(-(-count // first.rows), starts[-1]),
        in_specs=[_ANY] * (2 + len(names) * len(shares)),
        out_specs=[_ANY] * len(shares),
        compiler_params=plgpu.CompilerParams(num_warps=first.warps, num_stages=first.stages),
        interpret=interpret,
    )(member, x, *(a for s in shares for a in s.planes.arrays()))


def in_order(parts: Sequence[jax.Array] | jax.Array) -> jax.Array:
    """The sum of parts[0], parts[1], ... in this order, whatever their shape."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


_ANY = pl.BlockSpec(memory_space=pl.ANY)
