"""Two E2M1 codes to a byte, the low nibble first, under a scale per group of inputs.

What NVFP4 and MXFP4 have in common; see nvfp4.py and mxfp4.py for where they differ.
"""

from __future__ import annotations

import jax
import numpy as np
from flax import struct

from ...mesh.units import take
from ..errors import CheckpointError
from . import bits, gather
from .base import COLS, ROWS, Plane, QuantizedTensor


@struct.dataclass
class Fp4Tensor(QuantizedTensor):
    """W[n, k] = e2m1(code[n, k]) * s[n, k // group], with s = scale (* or /) whole.

    Attributes:
      packed: uint8 [..., N, ceil(K / 2)].
      scale: [..., N, groups]: float8_e4m3fn, or uint8 for E8M0.
      whole: None, or float32 [..., 1, 1], the scale of the whole tensor.
      divide: whether `whole` divides.
      group: inputs under one scale.
    """

    packed: Plane
    scale: Plane
    whole: Plane | None
    divide: bool = struct.field(pytree_node=False)
    group: int = struct.field(pytree_node=False)
    rows: int = struct.field(pytree_node=False)
    cols: int = struct.field(pytree_node=False)

    def _main(self) -> tuple[jax.Array, int, int, int]:
        return self.packed, 2, self.rows, -(-self.cols // 2)

    def numbers(self) -> jax.Array:
        """See the class."""
        w = bits.e2m1(bits.nibbles(self.packed, self.cols))
        scales = bits.factors(self.scale)
        if self.whole is not None:
            # One factor, as these scales are E4M3: the product of scales comes first, in float32.
            scales = [scales[0] / self.whole if self.divide else scales[0] * self.whole]
        for factor in scales:
            w = w * bits.spread(factor, COLS, self.group, self.cols)
        return w

    def _rows(self, ids: jax.Array) -> jax.Array:
        return self.replace(
            packed=self.packed[ids], scale=self.scale[ids], rows=ids.shape[0]
        ).numbers()

    def pick(
        self, axis: int, index: np.ndarray, parts: int = 1, only: int | None = None
    ) -> Fp4Tensor:
        """See `QuantizedTensor.pick`."""
        if gather.is_identity(index, self.shape[axis], parts):
            return self
        packed, scale = np.asarray(self.packed), np.asarray(self.scale)
        size = len(index) // parts
        pairs = gather.units_of(index, 2, parts) if axis == COLS else None
        group, groups = self.group, index
        if axis == COLS:
            group, groups = gather.regroup(index, self.group, self.cols, parts, only=only)
            if pairs is not None:
                pairs, _ = gather.own(pairs, parts, only)
        index, parts = gather.own(index, parts, only)
        whole = gather.copies(self.whole, axis, parts)
        if axis == ROWS:
            return self.replace(
                packed=take(packed, axis, index),
                scale=gather.take_scales(scale, axis, index),
                whole=whole,
                rows=size,
            )
        if pairs is not None:
            packed = take(packed, axis, pairs)
        else:
            codes = take(bits.nibbles(packed, self.cols).astype(np.uint8), axis, index)
            packed = gather.joined(bits.pack_nibbles(gather.by_parts(codes, parts)))
        return self.replace(
            packed=packed,
            scale=gather.take_scales(scale, axis, groups),
            whole=whole,
            group=group,
            cols=size,
        )


def fp4_tensor(
    packed: np.ndarray,
    scale: np.ndarray,
    group: int,
    whole: np.ndarray | None = None,
    *,
    divide: bool = False,
) -> Fp4Tensor:
    """A checked Fp4Tensor; packed [..., N, K / 2], scale [..., N, ceil(K / group)].

    Raises:
      CheckpointError: the scales do not fit.
    """
    n, cols = packed.shape[-2], 2 * packed.shape[-1]
    wanted = (*packed.shape[:-1], -(-cols // group))
    if tuple(scale.shape) != wanted:
        raise CheckpointError(
            f"scales are {list(scale.shape)}; packed codes of {list(packed.shape)} in groups of "
            f"{group} need {list(wanted)}"
        )
    if whole is not None:
        lead = packed.shape[:-2]
        if whole.size not in (1, int(np.prod(lead))):
            raise CheckpointError(f"a global scale of {list(whole.shape)}; allowed: one number")
        per = np.reshape(whole, (*lead, 1, 1) if whole.size > 1 else (1,) * packed.ndim)
        whole = np.ascontiguousarray(np.broadcast_to(per, (*lead, 1, 1)), np.float32)
    return Fp4Tensor(packed.view(np.uint8), scale, whole, divide, group, n, cols)
