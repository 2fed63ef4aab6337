"""Weights of a byte (or more) each, under a scale per block.

    W[n, k] = (w[n, k] - z) * scale[n // bn, k // bk]

covers FP8 and int8, per tensor, channel, group and block; the last blocks may be partial.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ...mesh.units import take
from ..errors import CheckpointError
from . import bits, gather
from .base import COLS, ROWS, Plane, QuantizedTensor


@struct.dataclass
class ScaledTensor(QuantizedTensor):
    """A weight with one number per element and one scale per block.

    Attributes:
      weight: [..., N, K], float8_e4m3fn or int8.
      scale: [..., blocks along N, blocks along K]: a float dtype, or uint8 for E8M0.
      zero: None, or zero points shaped as the scale.
      block: rows and columns of a block; 0 is all of a share.
    """

    weight: Plane
    scale: Plane
    zero: Plane | None
    block: tuple[int, int] = struct.field(pytree_node=False)
    rows: int = struct.field(pytree_node=False)
    cols: int = struct.field(pytree_node=False)

    def _main(self) -> tuple[jax.Array, int, int, int]:
        return self.weight, 2, self.rows, self.cols

    def numbers(self) -> jax.Array:
        """See the module."""
        return _numbers(self.weight, self.scale, self.zero, self.block)

    def _rows(self, ids: jax.Array) -> jax.Array:
        bn, bk = self.block
        at = jnp.zeros_like(ids) if bn == 0 else ids // bn
        zero = None if self.zero is None else self.zero[at]
        return _numbers(self.weight[ids], self.scale[at], zero, (1, bk))

    def pick(
        self, axis: int, index: np.ndarray, parts: int = 1, only: int | None = None
    ) -> ScaledTensor:
        """See `QuantizedTensor.pick`."""
        if gather.is_identity(index, self.shape[axis], parts):
            return self
        # A zero of a format with zero points is not the code 0: its blocks get the scale 0.
        block, groups = gather.regroup(index, self.block[axis], self.shape[axis], parts, wild=self.zero is None, only=only)
        index, parts = gather.own(index, parts, only)
        weight = take(np.asarray(self.weight), axis, index)
        scale = gather.take_scales(np.asarray(self.scale), axis, groups)
        zero = None
        if self.zero is not None:
            zero = gather.take_scales(np.asarray(self.zero), axis, groups)
            scale = without(scale, axis, groups)
        size = len(index) // parts
        if axis == ROWS:
            return self.replace(
                weight=weight, scale=scale, zero=zero, block=(block, self.block[1]), rows=size
            )
        return self.replace(
            weight=weight, scale=scale, zero=zero, block=(self.block[0], block), cols=size
        )


def without(scale: np.ndarray, axis: int, groups: np.ndarray) -> np.ndarray:
    """The scales with those of padding set to zero."""
    if (groups >= 0).all():
        return scale
    shape = [1] * scale.ndim
    shape[axis] = len(groups)
    return np.where((groups >= 0).reshape(shape), scale, np.zeros((), scale.dtype))


def _numbers(weight: Any, scale: Any, zero: Any, block: tuple[int, int]) -> jax.Array:
    n, k = weight.shape[-2:]

    def full(values: jax.Array) -> jax.Array:
        return bits.spread(bits.spread(values, ROWS, block[0], n), COLS, block[1], k)

    w = weight.astype(jnp.float32)
    if zero is not None:
        w = w - full(zero.astype(jnp.float32))
    for factor in bits.factors(scale):
        w = w * full(factor)
    return w


def scaled_tensor(
    weight: np.ndarray,
    scale: np.ndarray,
    block: tuple[int, int],
    zero: np.ndarray | None = None,
) -> ScaledTensor:
    """A checked ScaledTensor.

    Args:
      scale: with the leading axes of the weight, [..., ceil(N / bn), ceil(K / bk)].

    Raises:
      CheckpointError: the grid of scales does not fit the weight.
    """
    n, k = weight.shape[-2:]
    grid = tuple(1 if b == 0 else -(-size // b) for size, b in zip((n, k), block, strict=True))
    wanted = (*weight.shape[:-2], *grid)
    for what, plane in (("scales", scale), ("zero points", zero)):
        if plane is not None and tuple(plane.shape) != wanted:
            raise CheckpointError(
                f"{what} are {list(plane.shape)}; a weight of {list(weight.shape)} in blocks of "
                f"{list(block)} needs {list(wanted)}"
            )
    return ScaledTensor(weight, e8m0_as_bytes(scale), zero, (block[0], block[1]), n, k)


def e8m0_as_bytes(scale: np.ndarray) -> np.ndarray:
    """E8M0 scales as the bytes that stand for them in a node; other dtypes as they are."""
    return scale.view(np.uint8) if scale.dtype.name == "float8_e8m0fnu" else scale
