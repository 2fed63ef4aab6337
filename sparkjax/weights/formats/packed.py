"""compressed-tensors `pack-quantized`: integers of 2 to 8 bits, packed along the inputs.

    W[n, k] = (q[n, k] - z[n, g]) * scale[n, g],  g = k // group, or g_idx[k]

Per row the fields are a little-endian stream of 32-bit words; a field is q + 2^(bits - 1), q
signed. Zero points have the same offset and are packed along the outputs. Source:
compressed-tensors `pack_quantized` (pack_to_int32, unpack_from_int32).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ...mesh.units import take
from ..errors import CheckpointError
from . import bits, gather
from .base import COLS, ROWS, Plane, QuantizedTensor
from .int8 import group_of
from .scaled import without


@struct.dataclass
class PackedTensor(QuantizedTensor):
    """A weight of packed integers.

    Attributes:
      packed: int32 [..., N, words of K fields].
      scale: [..., N, G], a float dtype.
      zero: None, int32 [..., words of N fields, G] packed, or int8 [..., N, G].
      groups: None, or int32 [..., 1, K], the group of each input.
      width: bits of a field.
      group: inputs of a group; 0 is one group of all.
    """

    packed: Plane
    scale: Plane
    zero: Plane | None
    groups: Plane | None
    width: int = struct.field(pytree_node=False)
    group: int = struct.field(pytree_node=False)
    rows: int = struct.field(pytree_node=False)
    cols: int = struct.field(pytree_node=False)

    def _main(self) -> tuple[jax.Array, int, int, int]:
        return self.packed, 2, self.rows, bits.words(self.cols, self.width)

    def numbers(self) -> jax.Array:
        """See the module."""
        zero = None if self.zero is None else self._zeros()
        return self._numbers(self.packed, self.scale, zero)

    def _rows(self, ids: jax.Array) -> jax.Array:
        zero = None if self.zero is None else self._zeros()[ids]
        return self._numbers(self.packed[ids], self.scale[ids], zero)

    def _zeros(self) -> jax.Array:
        """Zero points [..., N, G], without the offset."""
        zero: Plane = self.zero
        if zero.dtype == jnp.int8:
            return zero.astype(np.int32)
        fields = bits.unpack(zero.swapaxes(-1, -2), self.width, self.rows)
        return fields.swapaxes(-1, -2) - (1 << self.width - 1)

    def _numbers(self, packed: jax.Array, scale: jax.Array, zero: jax.Array | None) -> jax.Array:
        q = bits.unpack(packed, self.width, self.cols) - (1 << self.width - 1)
        if zero is not None:
            q = q - self._spread(zero)
        return q.astype(jnp.float32) * self._spread(scale.astype(jnp.float32))

    def _spread(self, values: jax.Array) -> jax.Array:
        if self.groups is None:
            return bits.spread(values, COLS, self.group, self.cols)
        return by_group(values, self.groups)

    def pick(
        self, axis: int, index: np.ndarray, parts: int = 1, only: int | None = None
    ) -> PackedTensor:
        """See `QuantizedTensor.pick`."""
        if gather.is_identity(index, self.shape[axis], parts):
            return self
        size, scale = len(index) // parts, np.asarray(self.scale)
        zero = None if self.zero is None else np.asarray(self._host()._zeros())
        whole, count = (index, parts), scale.shape[-1]
        runs = None
        if axis == COLS:
            # Whole words of fields go out as they came.
            runs = gather.units_of(index, 32 // math.gcd(32, self.width), parts)
            if runs is not None:
                runs, _ = gather.own(runs, parts, only)
            if self.groups is None:
                group, chosen = gather.regroup(
                    index, self.group, self.cols, parts, wild=zero is None, only=only
                )
        index, parts = gather.own(index, parts, only)
        if axis == ROWS:
            packed = take(np.asarray(self.packed), axis, index)
            scale = without(gather.take_scales(scale, axis, index), axis, index)
            if zero is not None:
                zero = self._stored(gather.take_scales(zero, axis, index), parts)
            groups = gather.copies(self.groups, axis, parts)
            return self.replace(packed=packed, scale=scale, zero=zero, groups=groups, rows=size)
        if runs is not None:
            packed = take_words(np.asarray(self.packed), runs, self.width)
        else:
            fields = bits.unpack(np.asarray(self.packed), self.width, self.cols)
            fields = take(fields - (1 << self.width - 1), axis, index) + (1 << self.width - 1)
            packed = gather.joined(bits.pack(gather.by_parts(fields, parts), self.width))
        groups = None
        if self.groups is not None:
            groups, chosen = pick_groups(np.asarray(self.groups), *whole, count, only)
            group = self.group
        scale = without(gather.take_scales(scale, axis, chosen), axis, chosen)
        if zero is not None:
            zero = self._stored(gather.take_scales(zero, axis, chosen), 1)
        return self.replace(
            packed=packed, scale=scale, zero=zero, groups=groups, group=group, cols=size
        )

    def _host(self) -> PackedTensor:
        return self.replace(zero=np.asarray(self.zero))

    def _stored(self, zero: np.ndarray, parts: int) -> np.ndarray:
        """Zero points [..., N, G] as this tensor's file has them, each share by itself."""
        if np.asarray(self.zero).dtype == np.int8:
            return zero.astype(np.int8)
        fields = gather.by_parts(zero.swapaxes(-1, -2) + (1 << self.width - 1), parts)
        return gather.joined(bits.pack(fields, self.width)).swapaxes(-1, -2)


def by_group(values: jax.Array, groups: jax.Array) -> jax.Array:
    """values [..., N, G] at the group of each input, groups [..., 1, K]: [..., N, K]."""
    at = jnp.broadcast_to(groups, (*values.shape[:-1], groups.shape[-1]))
    return jnp.take_along_axis(values, at, axis=-1)


def pick_groups(
    groups: np.ndarray, index: np.ndarray, parts: int, count: int, only: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """The groups of picked inputs, and which groups each share keeps: all of them, and one more
    (-1, to be given the scale 0) for padding, if there is padding in any share."""
    kept = np.arange(count)
    if (index < 0).any():
        kept = np.append(kept, -1)
    index, parts = gather.own(index, parts, only)
    found = np.where(index < 0, count, groups[..., np.maximum(index, 0)])
    return found.astype(np.int32), np.tile(kept, parts)


def take_words(packed: np.ndarray, runs: np.ndarray, width: int) -> np.ndarray:
    """Runs of 32 / gcd(32, width) fields of packed rows [..., words], which are whole words."""
    words = width // math.gcd(32, width)
    return take(packed, COLS, (runs[:, None] * words + np.arange(words)).reshape(-1))


def packed_tensor(
    packed: np.ndarray,
    scale: np.ndarray,
    cols: int,
    zero: np.ndarray | None = None,
    groups: np.ndarray | None = None,
    group: int | None = None,
    likely: Sequence[int] = (),
) -> PackedTensor:
    """A checked PackedTensor.

    Args:
      packed: int32 [..., N, words].
      scale: [..., N, G] or one per matrix.
      cols: K, from the file's `weight_shape`.
      zero: int32 [..., words of N, G], or int8 [..., N, G].
      groups: int32 [K], `weight_g_idx`.
      group: the config's group_size.
      likely: the config's bits, for rows so short that several widths fit.

    Raises:
      CheckpointError: shapes that do not fit.
    """
    *lead, n, count = packed.shape
    widths = [b for b in range(1, 9) if bits.words(cols, b) == count]
    if not widths or cols < 1:
        raise CheckpointError(f"{count} words a row do not hold {cols} inputs of 1 to 8 bits")
    width = max(widths, key=lambda b: (b in likely, cols * b % 32 == 0, b in (2, 4, 8), b))
    if scale.size == 1:
        scale = np.broadcast_to(scale.reshape(()), (*lead, n, 1))
        if zero is not None and zero.size == 1 and zero.dtype == np.int8:
            zero = np.broadcast_to(zero.reshape(()), (*lead, n, 1))
    if scale.ndim == packed.ndim - 1:
        scale = scale[..., None]
    if tuple(scale.shape[:-1]) != (*lead, n):
        raise CheckpointError(f"scales are {list(scale.shape)}; the weight has {n} rows")
    g = scale.shape[-1]
    if zero is not None:
        down = n if zero.dtype == np.int8 else bits.words(n, width)
        if tuple(zero.shape) != (*lead, down, g):
            raise CheckpointError(
                f"zero points are {zero.dtype} {list(zero.shape)}; {n} rows of {width} bits in {g} "
                f"groups need {[*lead, down, g]}"
            )
    if groups is not None:
        check_groups(groups, cols, g)
        groups = np.broadcast_to(groups.astype(np.int32), (*lead, 1, cols))
        size = 0
    else:
        size = group_of(cols, g, group)
    return PackedTensor(packed, np.ascontiguousarray(scale), zero, groups, width, size, n, cols)


def check_groups(groups: np.ndarray, cols: int, count: int) -> None:
    """Raises CheckpointError unless each of `cols` inputs names one of `count` groups."""
    if groups.shape[-1] != cols or (groups.size and not 0 <= groups.min() <= groups.max() < count):
        raise CheckpointError(
            f"g_idx of {list(groups.shape)} for {cols} inputs in {count} groups: out of range"
        )
