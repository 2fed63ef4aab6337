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

from ...weights.formats.awq import SLOTS
from ...weights.formats.gptq import PLANES
from . import blocks, decode, trellis
from .planes import Spec

Refs = dict[str, Any]
"""Plane name -> Ref, see `planes.Planes`."""


@dataclasses.dataclass(frozen=True)
class Tile:
    """Sizes of one program's share of the work.

    Attributes:
      outputs: rows of the weight, a power of two from 16.
      words: elements (see planes.py) along K in a step, a power of two from 16.
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
    x_tile: Any,
    tile: Tile,
    interpret: bool,
) -> list[jax.Array]:
    """Sums over the inputs of steps[0] <= step < steps[1], for weights of one Spec.

    Args:
      member: int32 [], which matrix of the stacks.
      n0: int32 [], the first output.
      x_tile: (field, first element) -> bfloat16 [tile.rows, tile.words], the inputs that a field of
        these elements meets; zeros past the end of K. For 12-bit weights it has `at`, see `Rows`.

    Returns:
      For each weight float32 [tile.outputs, tile.rows]: weights times x, transposed, without the
      scale of the whole tensor.
    """
    at = Outputs(spec, member, n0, tile)
    stepped = spec.step < spec.words or spec.code == "gguf"
    lows = spec.code == "gguf" and blocks.LAYOUTS[spec.kind].minimum
    ones = jnp.ones((at.count, tile.words), jnp.bfloat16) if lows else None
    forms = [(i, slot) for i in range(len(weights)) for slot in range(spec.across)]

    def step(index: jax.Array, carry: Any) -> Any:
        sums, numbers, words = carry
        w0 = index * tile.words
        loaded = [
            at.fields(refs, w0, interpret, zeros, *(words[i : i + 1]))
            for i, (refs, (_, zeros, _)) in enumerate(zip(weights, numbers, strict=True))
        ]
        # Of the next step: loads that no product waits for.
        later = [at.numbers(refs, w0 + tile.words) for refs in weights] if stepped else numbers
        ahead = [at.load(refs["words"], w0 + tile.words) for refs in weights] if words else words
        parts = [jnp.zeros_like(s) for s in sums] if stepped else list(sums)
        total = jnp.zeros((at.count, tile.rows), jnp.float32)
        for field in range(spec.fields):
            x = x_tile(field, w0)
            if ones is not None:
                total = total + _product(ones, x)
            for j, (i, slot) in enumerate(forms):
                parts[j] = parts[j] + _product(loaded[i](field, slot), x)
        if stepped:
            parts = [
                s + numbers[i][0][slot][:, None] * part
                for s, part, (i, slot) in zip(sums, parts, forms, strict=True)
            ]
        if ones is not None:
            parts = [p + n[2][:, None] * total for p, n in zip(parts, numbers, strict=True)]
        return parts, later, ahead

    zeros = [jnp.zeros((at.count, tile.rows), jnp.float32) for _ in forms]
    first = [at.numbers(refs, steps[0] * tile.words if stepped else 0) for refs in weights]
    words = [at.load(refs["words"], steps[0] * tile.words) for refs in weights if spec.ahead]
    sums, *_ = lax.fori_loop(*steps, step, (zeros, first, words))
    if spec.block is not None and not stepped:
        sums = [s * first[i][0][slot][:, None] for s, (i, slot) in zip(sums, forms, strict=True)]
    if spec.escapes:
        width = tile.words * spec.fields
        span = (steps[0] * width, steps[1] * width)
        sums = [at.escaped(r, s, x_tile, span) for r, s in zip(weights, sums, strict=True)]
    across = spec.across
    return [lowered(spec, joined(sums[i * across : (i + 1) * across])) for i in range(len(weights))]


def _product(w: jax.Array, x: jax.Array) -> jax.Array:
    return lax.dot_general(w, x, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def output(spec: Spec, row: jax.Array, slot: int) -> jax.Array:
    """int32: the output of a slot of the elements in these rows."""
    return row * spec.across + (SLOTS.index(slot) if spec.across > 1 else 0)


def joined(parts: Sequence[jax.Array]) -> jax.Array:
    """Outputs of each slot of the elements, [n, X] each, in the outputs' order: [n * slots, X]."""
    if len(parts) == 1:
        return parts[0]
    found = woven([parts[slot] for slot in SLOTS])
    axes = (0, *range(2, found.ndim), 1)
    return found.transpose(axes).reshape(-1, parts[0].shape[1])


def woven(parts: Sequence[jax.Array]) -> jax.Array:
    """[n, w, 2, 2, ...]: parts at the places of their numbers' bits, the highest first."""
    if len(parts) == 1:
        return parts[0]
    return jnp.stack([woven(parts[0::2]), woven(parts[1::2])], axis=-1)


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
        self.spec, self.member, self.tile = spec, member, tile
        self.count = tile.outputs // spec.across
        self.first = n0 // spec.across
        self.row = self.first + jnp.arange(self.count, dtype=jnp.int32)
        # Of each slot.
        self.outputs = [
            jnp.minimum(output(spec, self.row, slot), spec.rows - 1) for slot in range(spec.across)
        ]
        self.ragged = spec.rows % tile.outputs != 0

    def rows(self, plane: Any, w0: Any, size: int, end: int) -> jax.Array:
        """[count, size] from column w0 on; zeros past `end` columns and past the last row."""
        ref = plane.at[self.member, pl.ds(self.first, self.count), pl.ds(w0, size)]
        mask = self._mask(w0 + jnp.arange(size, dtype=jnp.int32), end)
        if mask is None:
            return plgpu.load(ref)
        return plgpu.load(ref, mask=mask, other=jnp.zeros((), plane.dtype))

    def _mask(self, column: jax.Array, end: int) -> jax.Array | None:
        shape = (self.count, column.shape[0])
        mask = None
        if self.ragged:
            inside = (self.row < self.spec.rows // self.spec.across)[:, None]
            mask = jnp.broadcast_to(inside, shape)
        if end % column.shape[0]:
            inside = jnp.broadcast_to((column < end)[None, :], shape)
            mask = inside if mask is None else mask & inside
        return mask

    def load(self, plane: Any, w0: Any) -> list[jax.Array]:
        """The words under the elements from w0 on: what `elements` makes elements of."""
        spec, size = self.spec, self.tile.words
        if not spec.ahead:
            per = 32 // spec.size
            return [self.rows(plane, w0 // per, size // per, -(-spec.words // per))]
        if spec.code == "trellis":
            return trellis.load(plane, self.member, self.first, w0, (self.count, size), spec.rate)
        if spec.code == "gguf":
            return self._group(plane, w0).codes()
        column = w0 + jnp.arange(size, dtype=jnp.int32)
        row, last = jnp.minimum(self.row, plane.shape[-2] - 1), plane.shape[-1] - 1
        found = []
        for _, _, at, _, straddles in runs(spec, column * spec.fields):
            for word in (at, at + 1) if straddles else (at,):
                index = (self.member, row[:, None], jnp.minimum(word, last)[None, :])
                whole = tuple(jnp.broadcast_to(i, (self.count, size)) for i in index)
                found.append(plgpu.load(plane.at[whole]))
        return found

    def _group(self, plane: Any, w0: Any) -> blocks.Group:
        group = w0 // blocks.WIDTH
        return blocks.Group(self.spec.kind, plane, self.member, self.outputs[0], group)

    def elements(self, words: Sequence[jax.Array], w0: Any) -> jax.Array:
        """uint32 [count, words]: the elements from w0 on; past the end of K they are arbitrary."""
        spec, size = self.spec, self.tile.words
        if spec.code == "gguf":
            return blocks.elements(spec.kind, list(words), w0 // blocks.WIDTH)
        if spec.size == 32:
            return words[0]
        place = jnp.arange(size, dtype=jnp.int32)
        if not spec.ahead:
            per = 32 // spec.size
            shape = (self.count, size // per, per)
            spread = jnp.broadcast_to(words[0][:, :, None], shape).reshape(self.count, size)
            return spread >> (place % per * spec.size).astype(jnp.uint32)[None, :]
        found, words = jnp.zeros((), jnp.uint32), list(words)
        for low, width, _, shift, straddles in runs(spec, (w0 + place) * spec.fields):
            by = shift.astype(jnp.uint32)[None, :]
            codes = words.pop(0) >> by
            if straddles:
                # Two shifts, since one by 32 is undefined.
                codes = codes | (words.pop(0) << 1) << (31 - by)
            if spec.planar:
                codes = _spread(codes & ((1 << width * spec.fields) - 1), width)
            found = found | codes << low
        return found

    def block_scale(self, refs: Refs, w0: Any, slot: int = 0) -> jax.Array:
        """float32 [count]: the block scale of the inputs of element w0 (the last block past K)."""
        found = self._blocks(refs["block_scale"], w0, slot)
        if found.dtype == jnp.uint8:
            return decode.e8m0_float(found.astype(jnp.uint32))
        return found.astype(jnp.float32)

    def _blocks(self, plane: Any, w0: Any, slot: int) -> jax.Array:
        """A plane shaped as the block scales: [count], of the inputs of element w0."""
        assert self.spec.block is not None
        bn = self.spec.block[0]
        row = self.outputs[slot]
        row = row if bn == 1 else row // bn if bn else jnp.zeros_like(row)
        return plgpu.load(plane.at[self._same(self.member), row, self._column(plane, w0)])

    def _column(self, plane: Any, w0: Any) -> jax.Array:
        """int32 [count]: the block of the inputs of element w0, the same for all."""
        assert self.spec.block is not None
        bk = self.spec.block[1]
        column = jnp.minimum(w0 * self.spec.fields // bk, plane.shape[-1] - 1) if bk else 0
        return self._same(jnp.asarray(column, jnp.int32))

    def _same(self, index: jax.Array) -> jax.Array:
        """An index for every row: those of one load have one shape."""
        return jnp.broadcast_to(index, self.row.shape)

    def numbers(self, refs: Refs, w0: Any) -> tuple[list[jax.Array], list[jax.Array], Any]:
        """Block scales and `zeros` of the inputs of element w0, for each slot [count]; empty where
        there are none. And GGUF's minima float32 [count], or None."""
        if self.spec.code == "gguf":
            scale, low = self._group(refs["words"], w0).numbers()
            return [scale], self.zeros(refs, w0), low
        slots = range(self.spec.across if self.spec.block is not None else 0)
        return [self.block_scale(refs, w0, slot) for slot in slots], self.zeros(refs, w0), None

    def group_scale(self, plane: Any, w0: jax.Array, interpret: bool) -> jax.Array:
        """uint32 [outputs, words]: the scale of each word, a bfloat16 in both halves."""
        spec, words = self.spec, self.tile.words
        per = 4 * spec.group
        packed = self._group_words(plane, w0 // per, words // per, -(-spec.words // per))
        spread = jnp.broadcast_to(packed[:, :, None], (*packed.shape, per))
        spread = spread.reshape(self.tile.outputs, words)
        place = jnp.arange(words, dtype=jnp.uint32)
        code = (spread >> (place % per // spec.group * 8)[None, :]) & 255
        if spec.group_kind == "e8m0":
            return decode.e8m0_scale(code)
        return decode.e4m3_scale(code, interpret)

    def _group_words(self, plane: Any, w0: Any, size: int, end: int) -> jax.Array:
        """uint32 [count, size] of the group scales from word w0 of a row's on."""
        if self.spec.group_rows == 1:
            return self.rows(plane, w0, size, end)
        # Outputs of a block read the same bytes.
        row = jnp.minimum(self.row, self.spec.rows - 1) // self.spec.group_rows
        column = w0 + jnp.arange(size, dtype=jnp.int32)
        index = (self.member, row[:, None], jnp.minimum(column, end - 1)[None, :])
        return plgpu.load(plane.at[tuple(jnp.broadcast_to(i, (self.count, size)) for i in index)])

    def zeros(self, refs: Refs, w0: Any) -> list[jax.Array]:
        """uint32 [count] for each slot: zero points as `decode.bits` and `decode.int8` want them, or
        the base as `decode.bf12` wants it."""
        spec = self.spec
        if spec.code == "bf12":
            base = plgpu.load(refs["base"].at[self.member]).astype(jnp.uint32) << 7
            return [self._same(base | base << 16)]
        if spec.code == "gguf":
            zero = blocks.LAYOUTS[spec.kind].zero
            if zero is None or zero == 1 << spec.width - 1:
                return []
            return [decode.pair(self._same(jnp.int32(128 + zero)))]
        if not spec.zero:
            return []
        plane = refs["zero"]
        if spec.zero == "bytes":
            found = [self._blocks(plane, w0, slot).astype(jnp.int32) for slot in range(spec.across)]
            # Less than the codes by the middle code, which `decode.int8` has taken off already.
            middle = 0 if spec.code == "int8" else 128 + (1 << spec.width - 1)
            return [decode.pair(z + middle) for z in found]
        column, last = self._column(plane, w0), plane.shape[-2] - 1

        def cells(at: jax.Array) -> jax.Array:
            found = plgpu.load(plane.at[self._same(self.member), jnp.minimum(at, last), column])
            return lax.bitcast_convert_type(found, jnp.uint32)

        mask = (1 << spec.width) - 1
        if spec.zero == "slots":
            words = cells(self.row)
            codes = [words >> slot * spec.width & mask for slot in range(spec.across)]
        else:
            # A word that had one subtracted as a whole gets it back as a whole, see formats.gptq.
            whole = spec.minus_one and 32 % spec.width == 0
            one = sum(1 << i for i in range(0, 32, spec.width)) if whole else 0
            code = jnp.zeros((), jnp.uint32)
            for low, width, at, shift, straddles in runs(spec, self.outputs[0], 1):
                by = shift.astype(jnp.uint32)
                found = (cells(at) + jnp.uint32(one)) >> by
                if straddles:
                    found = found | (cells(at + 1) << 1) << (31 - by)
                code = code | (found & ((1 << width) - 1)) << low
            codes = [code + 1 & mask if spec.minus_one and not whole else code]
        less = 128 if spec.code == "int8" else -128
        return [decode.pair(code.astype(jnp.int32) - less) for code in codes]

    def fields(
        self,
        refs: Refs,
        w0: jax.Array,
        interpret: bool,
        zeros: Sequence[jax.Array] | None = None,
        words: list[jax.Array] | None = None,
    ) -> Callable[[int, int], jax.Array]:
        """Loads a step's weights; the result gives each field of each slot as bfloat16 (float16 of a
        trellis) [count, words], not yet `lowered` and without block scale and scale of the whole.

        Args:
          zeros, words: of these inputs, where they are there already.
        """
        spec = self.spec
        loaded = self.load(refs["words"], w0) if words is None else words
        if spec.code == "trellis":
            book = (spec.rate, spec.codebook, spec.as_e4m3, interpret)
            numbers = trellis.values(loaded, *book)
            return lambda field, slot: numbers
        elements = self.elements(loaded, w0)
        if spec.code == "bf16":
            return lambda field, slot: elements
        scale = self.group_scale(refs["group_scale"], w0, interpret) if spec.group else None
        if spec.code == "e2m1":
            assert scale is not None
            return lambda field, slot: decode.e2m1(elements, field, scale, spec.lifted, interpret)
        if spec.code == "e4m3":
            return lambda field, slot: decode.e4m3(elements, field, scale, interpret)
        spread = [
            jnp.broadcast_to(z[:, None], elements.shape)
            for z in (self.zeros(refs, w0) if zeros is None else zeros)
        ]

        if spec.code == "bf12":
            codes = self.rows(refs["codes"], w0, self.tile.words, spec.words).astype(jnp.uint32)
            return lambda field, slot: decode.bf12(elements, codes, field, spread[0], interpret)

        def integers(field: int, slot: int) -> jax.Array:
            zero = spread[slot] if spread else None
            if spec.width == 8:
                return decode.int8(elements, field, spec.offset, zero, interpret)
            first = (field + slot) * spec.stride
            return decode.bits(elements, first, spec.width, zero, interpret)

        return integers

    def escaped(self, refs: Refs, sums: jax.Array, x_tile: Any, span: tuple[Any, Any]) -> jax.Array:
        """Sums to which escaped weights of inputs span[0] <= k < span[1] came as `decode.bf12` gives
        them, with their own numbers instead: one after the other in the order of their places."""
        spec, row = self.spec, self.outputs[0]
        member, total = self._same(self.member), refs["places"].shape[-1]
        base = plgpu.load(refs["base"].at[self.member]).astype(jnp.uint32)
        start = plgpu.load(refs["starts"].at[member, row])
        end = plgpu.load(refs["starts"].at[member, jnp.minimum(row + 1, spec.rows - 1)])
        # Behind the last row the list is filled up, which its columns tell.
        count = jnp.where(
            row + 1 < spec.rows, end - start, jnp.minimum(spec.escapes, total - start)
        )

        def one(index: jax.Array, sums: jax.Array) -> jax.Array:
            inside = index < total
            index = jnp.minimum(index, total - 1)
            column = plgpu.load(refs["places"].at[member, index]) - row * spec.cols
            inside &= (column >= 0) & (column < spec.cols)
            inside &= (column >= span[0]) & (column < span[1])
            column = jnp.where(inside, column, 0)
            exponent = plgpu.load(refs["exponents"].at[member, index]).astype(jnp.uint32)
            words = plgpu.load(refs["words"].at[member, row, column // 4])
            rest = words >> (column % 4 * 8).astype(jnp.uint32)
            less = decode.joined(rest, exponent) - decode.joined(rest, base)
            product = less[:, None] * x_tile.at(column)
            return sums + jnp.where(inside[:, None], product, 0.0)

        def some(turn: jax.Array, sums: jax.Array) -> jax.Array:
            for i in range(ESCAPES):
                sums = one(start + turn * ESCAPES + i, sums)
            return sums

        turns = (jnp.max(count) + ESCAPES - 1) // ESCAPES
        return lax.fori_loop(0, turns, some, sums)


ESCAPES = 4
"""Escapes of a row whose loads are under way at once."""


def runs(
    spec: Spec, first: jax.Array, count: int = 0
) -> list[tuple[int, int, jax.Array, jax.Array, bool]]:
    """Where the bits of codes first .. first + count stand in a stream (or in its planes).

    Args:
      first: multiples of `count`, which is the spec's fields if 0.

    Returns:
      For each plane: the place of its bits in a code, how many they are, the word and the bit where
      they begin, and whether they may go on in the next word.
    """
    count = count or spec.fields
    if not spec.planar:
        bit = first * spec.width
        return [(0, spec.width, bit // 32, bit % 32, 32 % (count * spec.width) != 0)]
    found, low = [], 0
    for width in PLANES[spec.width]:
        bit = first % 32 * width
        word = first // 32 * spec.width + low + bit // 32
        found.append((low, width, word, bit % 32, False))
        low += width
    return found


def _spread(codes: jax.Array, width: int) -> jax.Array:
    """Four codes of 1, 2 or 4 bits, one to a byte."""
    two, one = (1 << 2 * width) - 1, (1 << width) - 1
    codes = (codes | codes << 16 - 2 * width) & two * 0x10001
    return (codes | codes << 8 - width) & one * 0x01010101
