"""MXFP8: E4M3 weights, an E8M0 byte for every 32 along the inputs: W = f32(w) * 2^(b - 127).

Sources: OCP Microscaling Formats v1.0; compressed-tensors `mxfp8-quantized`; ModelOpt MXFP8, whose
grid is rounded up where K is no multiple of 32 (the weight is not padded).
"""

from __future__ import annotations

import numpy as np

from .scaled import ScaledTensor, scaled_tensor

GROUP = 32


def mxfp8_tensor(weight: np.ndarray, scale: np.ndarray) -> ScaledTensor:
    """weight: float8_e4m3fn [..., N, K]; scale: uint8 or E8M0 [..., N, ceil(K / 32)].

    Raises:
      CheckpointError: the scales do not fit.
    """
    return scaled_tensor(weight, scale.view(np.uint8), (1, GROUP))
