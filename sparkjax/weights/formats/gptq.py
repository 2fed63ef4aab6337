"""GPTQ checkpoints, v1, v2 and planar: weights packed along the inputs, zero points along outputs.

    W[n, k] = scale[n, g] * (q[n, k] - z[n, g]),  g = k // group, or g_idx[k]

Files hold qweight [K b / 32, N], qzeros [G, N b / 32] and scales [G, N]; a node holds their
transposes. v1 stores z - 1, v2 stores z. Writers of v1 subtract one from every field by one
subtraction from the whole word, so a field with z = 0 borrows from its neighbour; adding to the
whole word undoes that (2, 4 and 8 bits). Other widths add per field, modulo 2^b.

Planar (`gptq_p`): for each 32 inputs first the words of the low plane (4 bits, or 2 for 3-bit
weights), then those of the higher ones; 5 = 4 + 1, 6 = 4 + 2, 7 = 4 + 2 + 1, 3 = 2 + 1.
Sources: AutoGPTQ, GPTQModel 7.7 (`TorchLinear`), AutoRound.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ...mesh.units import take
from ..errors import CheckpointError
from . import bits, gather
from .base import COLS, ROWS, Plane, QuantizedTensor
from .int8 import group_of
from .packed import by_group, check_groups, pick_groups, take_words
from .scaled import without

PLANES = {3: (2, 1), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1)}
"""Bits of a planar field's parts, the lowest first."""


@struct.dataclass
class GptqTensor(QuantizedTensor):
    """A weight in GPTQ's layout.

    Attributes:
      packed: int32 [..., N, words of K].
      zero: int32 [..., words of N, G].
      scale: float16 [..., N, G].
      groups: None, or int32 [..., 1, K], the group of each input (g_idx).
      width: bits of a field.
      planar: whether fields are cut into planes.
      minus_one: whether zero points are stored minus one (v1).
      group: inputs of a group; 0 is one group of all.
    """

    packed: Plane
    zero: Plane
    scale: Plane
    groups: Plane | None
    width: int = struct.field(pytree_node=False)
    planar: bool = struct.field(pytree_node=False)
    minus_one: bool = struct.field(pytree_node=False)
    group: int = struct.field(pytree_node=False)
    rows: int = struct.field(pytree_node=False)
    cols: int = struct.field(pytree_node=False)

    def _main(self) -> tuple[jax.Array, int, int, int]:
        return self.packed, 2, self.rows, self._words(self.cols)

    def _words(self, count: int) -> int:
        return -(-count // 32) * self.width if self.planar else bits.words(count, self.width)

    def _fields(self, words: Any, count: int) -> Any:
        if not self.planar:
            return bits.unpack(words, self.width, count)
        blocks = words.reshape(*words.shape[:-1], -1, self.width)
        value: Any = 0
        low = 0
        for plane in PLANES[self.width]:
            value = value | bits.unpack(blocks[..., low : low + plane], plane, 32) << low
            low += plane
        return value.reshape(*words.shape[:-1], -1)[..., :count]

    def _zeros(self) -> Any:
        """int32 [..., N, G]."""
        words = self.zero.swapaxes(-1, -2)
        whole_word = self.minus_one and 32 % self.width == 0
        if whole_word:
            one = sum(1 << i for i in range(0, 32, self.width))
            # Wraps around, as int32 additions do.
            words = words + np.array(one, np.uint32).view(np.int32)
        z = self._fields(words, self.rows)
        if self.minus_one and not whole_word:
            z = (z + 1) & ((1 << self.width) - 1)
        return z.swapaxes(-1, -2)

    def numbers(self) -> jax.Array:
        """See the module."""
        return self._numbers(self.packed, self.scale, self._zeros())

    def _rows(self, ids: jax.Array) -> jax.Array:
        return self._numbers(self.packed[ids], self.scale[ids], self._zeros()[ids])

    def _numbers(self, packed: jax.Array, scale: jax.Array, zero: jax.Array) -> jax.Array:
        q = self._fields(packed, self.cols)
        scale = scale.astype(jnp.float32)
        return self._spread(scale) * (q - self._spread(zero)).astype(jnp.float32)

    def _spread(self, values: jax.Array) -> jax.Array:
        if self.groups is None:
            return bits.spread(values, COLS, self.group, self.cols)
        return by_group(values, self.groups)

    def pick(
        self, axis: int, index: np.ndarray, parts: int = 1, only: int | None = None
    ) -> GptqTensor:
        """See `QuantizedTensor.pick`; the result is v2 and not planar."""
        if gather.is_identity(index, self.shape[axis], parts):
            return self
        size, scale = len(index) // parts, np.asarray(self.scale)
        packed = np.asarray(self.packed)
        whole, count = (index, parts), scale.shape[-1]
        runs = None
        if axis == COLS:
            if not self.planar:
                runs = gather.units_of(index, 32 // math.gcd(32, self.width), parts)
            if runs is not None:
                runs, _ = gather.own(runs, parts, only)
            if self.groups is None:
                group, chosen = gather.regroup(
                    index, self.group, self.cols, parts, wild=False, only=only
                )
        index, parts = gather.own(index, parts, only)
        zero = self.replace(zero=np.asarray(self.zero))._zeros()
        if axis == ROWS:
            if self.planar:
                packed = bits.pack(self._fields(packed, self.cols), self.width)
            zero = _pack_zeros(gather.take_scales(zero, axis, index), self.width, parts)
            return self.replace(
                packed=take(packed, axis, index),
                zero=zero,
                scale=without(gather.take_scales(scale, axis, index), axis, index),
                groups=gather.copies(self.groups, axis, parts),
                planar=False,
                minus_one=False,
                rows=size,
            )
        groups = None
        if self.groups is not None:
            groups, chosen = pick_groups(np.asarray(self.groups), *whole, count, only)
            group = self.group
        if runs is not None:
            packed = take_words(packed, runs, self.width)
        else:
            fields = gather.by_parts(take(self._fields(packed, self.cols), axis, index), parts)
            packed = gather.joined(bits.pack(fields, self.width))
        return self.replace(
            packed=packed,
            zero=_pack_zeros(gather.take_scales(zero, axis, chosen), self.width, 1),
            scale=without(gather.take_scales(scale, axis, chosen), axis, chosen),
            groups=groups,
            planar=False,
            minus_one=False,
            group=group,
            cols=size,
        )


def _pack_zeros(zero: np.ndarray, width: int, parts: int) -> np.ndarray:
    fields = gather.by_parts(zero.swapaxes(-1, -2), parts)
    return gather.joined(bits.pack(fields, width)).swapaxes(-1, -2)


def gptq_tensor(
    qweight: np.ndarray,
    qzeros: np.ndarray,
    scales: np.ndarray,
    g_idx: np.ndarray | None = None,
    group: int | None = None,
    *,
    minus_one: bool,
    planar: bool = False,
    width: int | None = None,
) -> GptqTensor:
    """A checked GptqTensor from the file's arrays.

    Args:
      group: the config's group_size, -1 for one group.
      minus_one: whether this is v1, which stores zero points minus one.
      planar: whether fields are cut into planes (widths that have planes).
      width: the config's bits; the shapes have the last word.

    Raises:
      CheckpointError: shapes that do not fit.
    """
    *lead, words, n = qweight.shape
    g = scales.shape[-2]
    if tuple(scales.shape) != (*lead, g, n):
        raise CheckpointError(f"scales are {list(scales.shape)}; the weight has {n} outputs")
    if tuple(qzeros.shape[:-1]) != (*lead, g):
        raise CheckpointError(f"qzeros are {list(qzeros.shape)}; there are {g} groups")
    across = qzeros.shape[-1]
    fits = [b for b in range(2, 9) if bits.words(n, b) == across and words * 32 // b > 0]
    if g_idx is not None:
        fits = [b for b in fits if bits.words(g_idx.shape[-1], b) == words] or fits
    if not fits:
        raise CheckpointError(
            f"qzeros are {list(qzeros.shape)}; {n} outputs of 2 to 8 bits do not fill {across} words"
        )
    exact = [b for b in fits if n * b == across * 32]
    width = width if width in fits else (exact or fits)[0]
    k = g_idx.shape[-1] if g_idx is not None else words * 32 // width
    groups = None
    if g_idx is not None:
        # A negative entry counts from the end, as in the kernels that made such files.
        g_idx = np.where(g_idx < 0, g_idx + g, g_idx)
        check_groups(g_idx, k, g)
        size = _plain_group(g_idx, g, group)
        if size is None:
            groups = np.broadcast_to(g_idx.astype(np.int32), (*lead, 1, k))
            size = 0
    else:
        size = group_of(k, g, group)

    def turned(a: np.ndarray) -> np.ndarray:
        return a.swapaxes(-1, -2)

    if planar and width not in PLANES:
        planar = False
    return GptqTensor(
        turned(qweight), turned(qzeros), turned(scales), groups, width, planar, minus_one, size, n, k
    )


def _plain_group(g_idx: np.ndarray, count: int, group: int | None) -> int | None:
    """The group size when g_idx says no more than k // group."""
    k = g_idx.shape[-1]
    try:
        size = group_of(k, count, group)
    except CheckpointError:
        return None
    plain = np.arange(k) // (size or k)
    return size if g_idx.ndim == 1 and np.array_equal(g_idx, plain) else None
