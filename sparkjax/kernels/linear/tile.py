"""The inner loop of the GPU kernels: weights of some outputs times some rows of x, along K.

Weights stand on the matrix unit's long side (outputs), rows of x on the short one, and a row count
is filled up to one of a few sizes, so one arithmetic serves every row count: what a row comes out
as depends on the row, the weight and the order of the loop, which the weight's shape alone decides.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from . import decode
from .planes import Spec

Refs = dict[str, Any]
"""Plane name -> Ref, see `planes.Planes`."""


@dataclasses.dataclass(frozen=True)
class Tile:
    """Sizes of one program's share of the work.

    Attributes:
      outputs: rows of the weight, a power of two from 16.
      words: elements of `Planes.words` along K in a step, a power of two from 16.
      rows: rows of x, a power of two from 8.
      warps: of 32 threads.
      stages: steps whose loads are under way at once.
      splits: programs that share the sum along K.
    """

    outputs: int
    words: int
    rows: int = 8
    warps: int = 4
    stages: int = 4
    splits: int = 1


def contract(
    spec: Spec,
    weights: Sequence[Refs],
    member: jax.Array,
    n0: jax.Array,
    steps: tuple[Any, Any],
    x_tile: Callable[[int, jax.Array], jax.Array],
    tile: Tile,
    interpret: bool,
) -> list[jax.Array]:
    """Sums over the inputs of steps[0] <= step < steps[1], for weights of one Spec.

    Args:
      member: int32 [], which matrix of the stacks.
      n0: int32 [], the first output.
      x_tile: (field, first word) -> bfloat16 [tile.rows, tile.words], the inputs that a field of
        these words meets; zeros past the end of K.

    Returns:
      For each weight float32 [tile.outputs, tile.rows]: weights times x, transposed, without the
      scale of the whole tensor.
    """
    at = Outputs(spec, member, n0, tile)
    stepped = spec.step < spec.words

    def step(index: jax.Array, carry: Any) -> Any:
        sums, scales = carry
        w0 = index * tile.words
        loaded = [at.fields(refs, w0, interpret) for refs in weights]
        # Of the next step: a load that no product waits for.
        later = [at.block_scale(refs, w0 + tile.words) for refs in weights] if stepped else scales
        parts = [jnp.zeros_like(s) for s in sums] if stepped else list(sums)
        for field in range(spec.fields):
            x = x_tile(field, w0)
            for i, form in enumerate(loaded):
                parts[i] = parts[i] + lax.dot_general(
                    form(field), x, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
                )
        if stepped:
            parts = [
                s + scale[:, None] * part
                for s, scale, part in zip(sums, scales, parts, strict=True)
            ]
        return parts, later

    zeros = [jnp.zeros((tile.outputs, tile.rows), jnp.float32) for _ in weights]
    first = [at.block_scale(refs, steps[0] * tile.words) for refs in weights] if stepped else []
    sums, _ = lax.fori_loop(*steps, step, (zeros, first))
    if spec.block is not None and not stepped:
        sums = [s * at.block_scale(r, 0)[:, None] for s, r in zip(sums, weights, strict=True)]
    return [lowered(spec, s) for s in sums]


def lowered(spec: Spec, values: jax.Array) -> jax.Array:
    """Values without the power of two that the group scales brought."""
    return values * 2.0 ** (126 - decode.LIFT) if spec.lifted else values


def whole_scale(spec: Spec, refs: Refs, member: jax.Array, sums: jax.Array) -> jax.Array:
    """`sums` under the scale of the whole tensor, where there is one."""
    if not spec.whole:
        return sums
    scale = plgpu.load(refs["whole"].at[member])
    return sums * scale if spec.whole == "times" else sums / scale


class Outputs:
    """Loads of one program's outputs of one member."""

    def __init__(self, spec: Spec, member: jax.Array, n0: jax.Array, tile: Tile):
        self.spec, self.member, self.n0, self.tile = spec, member, n0, tile
        self.outputs = n0 + jnp.arange(tile.outputs, dtype=jnp.int32)
        self.ragged = spec.rows % tile.outputs != 0

    def rows(self, plane: Any, w0: Any, size: int, end: int) -> jax.Array:
        """[outputs, size] from column w0 on; zeros past `end` columns and past the last output."""
        ref = plane.at[self.member, pl.ds(self.n0, self.tile.outputs), pl.ds(w0, size)]
        mask = None
        if self.ragged:
            mask = jnp.broadcast_to(
                (self.outputs < self.spec.rows)[:, None], (self.tile.outputs, size)
            )
        if end % size:
            inside = (w0 + jnp.arange(size, dtype=jnp.int32) < end)[None, :]
            inside = jnp.broadcast_to(inside, (self.tile.outputs, size))
            mask = inside if mask is None else mask & inside
        if mask is None:
            return plgpu.load(ref)
        return plgpu.load(ref, mask=mask, other=jnp.zeros((), plane.dtype))

    def block_scale(self, refs: Refs, w0: Any) -> jax.Array:
        """float32 [outputs]: the block scale of the inputs of word w0 (the last block past K)."""
        assert self.spec.block is not None
        bn, bk = self.spec.block
        plane = refs["block_scale"]
        column = (
            jnp.minimum(w0 * self.spec.fields // bk, plane.shape[-1] - 1)
            if bk
            else jnp.zeros((), jnp.int32)
        )
        row = jnp.minimum(self.outputs, self.spec.rows - 1)
        row = row if bn == 1 else row // bn if bn else jnp.zeros_like(row)
        found = plgpu.load(plane.at[self._same(self.member), row, self._same(column)])
        if found.dtype == jnp.uint8:
            return decode.e8m0_float(found.astype(jnp.uint32))
        return found.astype(jnp.float32)

    def _same(self, index: jax.Array) -> jax.Array:
        """An index for every output: those of one load have one shape."""
        return jnp.broadcast_to(index, self.outputs.shape)

    def group_scale(self, plane: Any, w0: jax.Array, interpret: bool) -> jax.Array:
        """uint32 [outputs, words]: the scale of each word, a bfloat16 in both halves."""
        spec, words = self.spec, self.tile.words
        per = 4 * spec.group
        packed = self.rows(plane, w0 // per, words // per, -(-spec.words // per))
        spread = jnp.broadcast_to(packed[:, :, None], (*packed.shape, per))
        spread = spread.reshape(self.tile.outputs, words)
        place = jnp.arange(words, dtype=jnp.uint32)
        code = (spread >> (place % per // spec.group * 8)[None, :]) & 255
        if spec.group_kind == "e8m0":
            return decode.e8m0_scale(code)
        return decode.e4m3_scale(code, interpret)

    def zero(self, plane: Any, w0: jax.Array) -> jax.Array:
        """uint32 [outputs, words]: 128 + the zero point of each output, see `decode.int4`."""
        assert self.spec.block is not None
        bk = self.spec.block[1]
        column = (
            jnp.minimum(w0 * self.spec.fields // bk, plane.shape[-1] - 1)
            if bk
            else jnp.zeros((), jnp.int32)
        )
        row = jnp.minimum(self.outputs, self.spec.rows - 1)
        words = lax.bitcast_convert_type(
            plgpu.load(plane.at[self._same(self.member), row // 8, self._same(column)]), jnp.uint32
        )
        if self.spec.minus_one:
            words = words + jnp.uint32(0x11111111)
        value = (words >> (row % 8 * 4).astype(jnp.uint32)) & 15
        pair = decode.zero_point(value)[:, None]
        return jnp.broadcast_to(pair, (self.tile.outputs, self.tile.words))

    def fields(self, refs: Refs, w0: jax.Array, interpret: bool) -> Callable[[int], jax.Array]:
        """Loads a step's weights; the result gives each field as bfloat16 [outputs, words],
        not yet `lowered` and without block scale and scale of the whole."""
        spec = self.spec
        words = self.rows(refs["words"], w0, self.tile.words, spec.words)
        if spec.code == "bf16":
            return lambda field: words
        scale = self.group_scale(refs["group_scale"], w0, interpret) if spec.group else None
        if spec.code == "e2m1":
            assert scale is not None
            return lambda field: decode.e2m1(words, field, scale, spec.lifted, interpret)
        if spec.code == "e4m3":
            return lambda field: decode.e4m3(words, field, scale, interpret)
        if spec.code == "int8":
            return lambda field: decode.int8(words, field, spec.offset, interpret)
        zero = self.zero(refs["zero"], w0) if spec.zero else None
        return lambda field: decode.int4(words, field, zero, interpret)
