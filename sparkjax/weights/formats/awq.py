"""AWQ "gemm" checkpoints: packed along the outputs, eight to a shuffled run.

    W[n, k] = (q[n, k] - z[n, g]) * scale[n, g],  g = k // group

The fields of a run of eight outputs lie in slots [0, 4, 1, 5, 2, 6, 3, 7]: slot s, the bits
[s * b, (s + 1) * b), holds output `SLOTS.index(s)` of the run. No offset: q and z are 0 .. 2^b - 1.
Files hold qweight [K, N b / 32], qzeros [G, N b / 32] and scales [G, N]; a node holds their
transposes. Sources: AutoAWQ `WQLinear_GEMM`; AutoRound's 5-, 6- and 7-bit files, which put the same
shuffle over a plain bit stream.
"""

from __future__ import annotations

import math

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

SLOTS = (0, 4, 1, 5, 2, 6, 3, 7)
"""The slot of each output of a run of eight."""


@struct.dataclass
class AwqTensor(QuantizedTensor):
    """A weight in AWQ's layout.

    Attributes:
      packed: int32 [..., words of N, K].
      zero: int32 [..., words of N, G].
      scale: float16 [..., N, G].
      width: bits of a field.
      group: inputs of a group; 0 is one group of all.
    """

    packed: Plane
    zero: Plane
    scale: Plane
    width: int = struct.field(pytree_node=False)
    group: int = struct.field(pytree_node=False)
    rows: int = struct.field(pytree_node=False)
    cols: int = struct.field(pytree_node=False)

    def _main(self) -> tuple[jax.Array, int, int, int]:
        return self.packed, 2, _words(self.rows, self.width), self.cols

    def numbers(self) -> jax.Array:
        """See the module."""
        q = _unpack(self.packed, self.width, self.rows)
        z = _unpack(self.zero, self.width, self.rows)
        z = bits.spread(z, COLS, self.group, self.cols)
        scale = bits.spread(self.scale.astype(jnp.float32), COLS, self.group, self.cols)
        return (q - z).astype(jnp.float32) * scale

    def pick(
        self, axis: int, index: np.ndarray, parts: int = 1, only: int | None = None
    ) -> AwqTensor:
        """See `QuantizedTensor.pick`."""
        if gather.is_identity(index, self.shape[axis], parts):
            return self
        size, scale = len(index) // parts, np.asarray(self.scale)
        packed, zero = np.asarray(self.packed), np.asarray(self.zero)
        runs = None
        if axis == ROWS:
            # Eight outputs are `width` whole words.
            runs = gather.units_of(index, 8 * (32 // math.gcd(32, 8 * self.width)), parts)
            if runs is not None:
                runs, _ = gather.own(runs, parts, only)
        else:
            group, chosen = gather.regroup(
                index, self.group, self.cols, parts, wild=False, only=only
            )
        index, parts = gather.own(index, parts, only)
        if axis == ROWS:

            def repacked(words: np.ndarray) -> np.ndarray:
                if runs is not None:
                    count = 8 * self.width // math.gcd(32, 8 * self.width)
                    return take(words, ROWS, (runs[:, None] * count + np.arange(count)).reshape(-1))
                fields = _unpack(words, self.width, self.rows)
                return _pack(take(fields, ROWS, index), self.width, parts)

            scale = without(gather.take_scales(scale, axis, index), axis, index)
            return self.replace(
                packed=repacked(packed), zero=repacked(zero), scale=scale, rows=size
            )
        return self.replace(
            packed=take(packed, axis, index),
            zero=gather.take_scales(zero, axis, chosen),
            scale=without(gather.take_scales(scale, axis, chosen), axis, chosen),
            group=group,
            cols=size,
        )


def _words(rows: int, width: int) -> int:
    return bits.words(-(-rows // 8) * 8, width)


def _unpack(words: Plane, width: int, rows: int) -> Plane:
    """[..., words, X] -> int32 [..., rows, X], in the outputs' order."""
    runs = -(-rows // 8)
    slots = bits.unpack(words.swapaxes(-1, -2), width, runs * 8)
    order = (np.arange(runs)[:, None] * 8 + np.array(SLOTS)).reshape(-1)[:rows]
    return slots[..., order].swapaxes(-1, -2)


def _pack(fields: np.ndarray, width: int, parts: int) -> np.ndarray:
    """The inverse, each share by itself: int32 [..., parts * words, X]."""
    fields = gather.by_parts(fields.swapaxes(-1, -2), parts)
    fill = -fields.shape[-1] % 8
    fields = np.pad(fields, [(0, 0)] * (fields.ndim - 1) + [(0, fill)])
    runs = fields.reshape(*fields.shape[:-1], -1, 8)[..., np.argsort(SLOTS)]
    return gather.joined(bits.pack(runs.reshape(fields.shape), width)).swapaxes(-1, -2)


def awq_tensor(
    qweight: np.ndarray, qzeros: np.ndarray, scales: np.ndarray, group: int | None = None
) -> AwqTensor:
    """A checked AwqTensor from the file's arrays.

    Raises:
      CheckpointError: shapes that do not fit.
    """
    *lead, k, w = qweight.shape
    g, n = scales.shape[-2:]
    if n < 1 or w * 32 % n or not 1 <= w * 32 // n <= 8:
        raise CheckpointError(f"{w} words a row do not hold {n} outputs of 1 to 8 bits")
    if tuple(qzeros.shape) != (*lead, g, w):
        raise CheckpointError(f"qzeros are {list(qzeros.shape)}; needed: {[*lead, g, w]}")
    width = w * 32 // n

    def turned(a: np.ndarray) -> np.ndarray:
        return a.swapaxes(-1, -2)

    size = group_of(k, g, group)
    return AwqTensor(turned(qweight), turned(qzeros), turned(scales), width, size, n, k)
