"""int8 weights under a scale per tensor, channel or group: W = (q - z) * scale.

Sources: compressed-tensors `int-quantized` (W8A8) and `naive-quantized`.
"""

from __future__ import annotations

import numpy as np

from ..errors import CheckpointError
from .scaled import ScaledTensor, scaled_tensor


def int8_tensor(
    weight: np.ndarray, scale: np.ndarray, zero: np.ndarray | None = None, group: int | None = None
) -> ScaledTensor:
    """weight: int8 [..., N, K]; scale: one number, [..., N], [..., N, 1] or [..., N, G].

    Args:
      zero: None, or signed zero points shaped as the scale.
      group: inputs of a group as the config says; else equal groups.

    Raises:
      CheckpointError: the scales do not fit.
    """
    lead, (n, k) = weight.shape[:-2], weight.shape[-2:]
    if scale.size == 1:
        shape, block = (*lead, 1, 1), (0, 0)
        scale = np.broadcast_to(scale.reshape(()), shape)
        zero = None if zero is None else np.broadcast_to(zero.reshape(()), shape)
    else:
        if scale.shape == (*lead, n):
            scale = scale[..., None]
        if scale.ndim != weight.ndim or scale.shape[-2] != n:
            raise CheckpointError(
                f"scales of {list(scale.shape)} do not fit a weight of {list(weight.shape)}"
            )
        zero = None if zero is None else zero.reshape(scale.shape)
        groups = scale.shape[-1]
        block = (1, 0) if groups == 1 else (1, group_of(k, groups, group))
    return scaled_tensor(weight, np.ascontiguousarray(scale), block, zero)


def group_of(size: int, groups: int, group: int | None = None) -> int:
    """The group size under which `size` inputs are `groups` groups (0: one group of all).

    The config's where it fits; else equal groups; else the usual size that fits.

    Raises:
      CheckpointError: none does.
    """
    if groups == 1:
        return 0
    usual = [size // groups] if size % groups == 0 else []
    for option in (group, *usual, 128, 64, 32, 16, 256, 512, 1024):
        if option and option > 0 and -(-size // option) == groups:
            return option
    raise CheckpointError(f"{groups} groups do not fit {size} inputs; group_size is {group}")
