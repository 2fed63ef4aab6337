"""FP8 (E4M3) weights under float or E8M0 scales, as DeepSeek, Qwen, vLLM and ModelOpt write them.

    W[n, k] = f32(weight[n, k]) * scale[n // bn, k // bk]

`weight_scale_inv` is what one multiplies by, despite its name. Per channel: a scale for each row.
Sources: DeepSeek-V3 `inference/kernel.py` (weight_dequant), compressed-tensors `float-quantized`,
ModelOpt FP8 and FP8_PER_CHANNEL_PER_TOKEN.
"""

from __future__ import annotations

import math

import numpy as np

from ..errors import CheckpointError
from .scaled import ScaledTensor, scaled_tensor

DEFAULT_BLOCK = (128, 128)


def fp8_tensor(
    weight: np.ndarray,
    scale: np.ndarray,
    block: tuple[int, int] | None = None,
    shards: int = 1,
) -> ScaledTensor:
    """An FP8 weight [..., N, K]; the scale's shape says how it is divided.

    Args:
      scale: one number, [...] (per matrix), [..., N] or [..., N, 1] (per channel), or the grid
        [..., ceil(N / bn), ceil(K / bk)].
      block: what the config says; where it does not fit the grid, 128 x 128, then equal blocks.
      shards: equal slices of rows whose blocks do not cross from one to the next.

    Raises:
      CheckpointError: a shape that is none of these.
    """
    lead, (n, k) = weight.shape[:-2], weight.shape[-2:]
    shape = tuple(scale.shape)
    if scale.size == 1 and not (block and scale.ndim == weight.ndim):
        return _whole(weight, np.broadcast_to(scale.reshape(()), (*lead, 1, 1)))
    if shape == lead or shape == (*lead, 1):
        return _whole(weight, scale.reshape(*lead, 1, 1))
    if shape == (*lead, n):
        return scaled_tensor(weight, scale[..., None], (1, 0))
    if shape == (*lead, n, 1) and n > 1:
        return scaled_tensor(weight, scale, (1, 0))
    if len(shape) != weight.ndim:
        raise CheckpointError(f"scales of {list(shape)} do not fit a weight of {list(weight.shape)}")
    if shards > 1:
        scale, block = _uncrossed(scale, (n, k), block or DEFAULT_BLOCK, shards)
    return scaled_tensor(weight, scale, block_of((n, k), scale.shape[-2:], block))


def _uncrossed(
    scale: np.ndarray, size: tuple[int, int], block: tuple[int, int], shards: int
) -> tuple[np.ndarray, tuple[int, int]]:
    """A grid that starts anew with every slice of rows (each ending in a partial block), as one
    grid of smaller blocks."""
    share, height = size[0] // shards, block[0]
    each = -(-share // height)
    if size[0] % shards or share % height == 0 or scale.shape[-2] != shards * each:
        return scale, block
    small = math.gcd(share, height)
    within = np.arange(share // small) * small // height
    index = np.concatenate([shard * each + within for shard in range(shards)])
    return np.ascontiguousarray(scale[..., index, :]), (small, block[1])


def _whole(weight: np.ndarray, scale: np.ndarray) -> ScaledTensor:
    return scaled_tensor(weight, np.ascontiguousarray(scale), (0, 0))


def block_of(
    size: tuple[int, int], grid: tuple[int, int], block: tuple[int, int] | None
) -> tuple[int, int]:
    """The block shape under which a weight of this size has this grid of scales."""
    for option in (block, DEFAULT_BLOCK):
        if option and all(
            -(-s // b) == g for s, b, g in zip(size, option, grid, strict=True)
        ):
            return option
    if all(g and s % g == 0 for s, g in zip(size, grid, strict=True)):
        return size[0] // grid[0], size[1] // grid[1]
    raise CheckpointError(
        f"a grid of {list(grid)} scales does not fit a weight of {list(size)}; "
        f"weight_block_size is {list(block) if block else 'not given'}"
    )
