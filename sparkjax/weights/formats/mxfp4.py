"""MXFP4: E2M1 codes and an E8M0 byte for every 32 inputs: W = e2m1 * 2^(b - 127).

The same bytes under several names: gpt-oss blocks, DeepSeek-V4's routed experts (I8 is an opaque
container there), compressed-tensors `mxfp4-pack-quantized`, ModelOpt, Quark and MiMo-V2.
Source: OCP Microscaling Formats v1.0, and each of these writers.
"""

from __future__ import annotations

import numpy as np

from ..errors import CheckpointError
from .fp4 import Fp4Tensor, fp4_tensor

GROUP = 32


def mxfp4_tensor(packed: np.ndarray, scale: np.ndarray) -> Fp4Tensor:
    """packed: uint8 or int8 [..., N, K / 2]; scale: uint8 or E8M0 [..., N, K / 32]."""
    return fp4_tensor(packed, scale.view(np.uint8), GROUP)


def mxfp4_blocks(blocks: np.ndarray, scales: np.ndarray) -> Fp4Tensor:
    """gpt-oss: blocks uint8 [..., N, K / 32, 16], scales uint8 [..., N, K / 32].

    Raises:
      CheckpointError: blocks of another size than 16 bytes.
    """
    if blocks.ndim < 3 or blocks.shape[-1] != GROUP // 2:
        raise CheckpointError(f"blocks are {list(blocks.shape)}; allowed: [..., N, K / 32, 16]")
    return mxfp4_tensor(blocks.reshape(*blocks.shape[:-2], -1), scales)
