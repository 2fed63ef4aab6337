"""NVFP4: E2M1 codes, an E4M3 scale for every 16 inputs, one float32 per tensor.

compressed-tensors (`nvfp4-pack-quantized`) divides by its `weight_global_scale`, ModelOpt
multiplies by its `weight_scale_2`; the two are reciprocal but for rounding, and each file's own
form is kept. Scales lie row-major in files (the 128 x 4 swizzle exists only at run time).
"""

from __future__ import annotations

import numpy as np

from .fp4 import Fp4Tensor, fp4_tensor

GROUP = 16


def nvfp4_compressed(packed: np.ndarray, scale: np.ndarray, whole: np.ndarray) -> Fp4Tensor:
    """W = e2m1 * (f32(weight_scale) / weight_global_scale)."""
    return fp4_tensor(packed, scale, GROUP, whole, divide=True)


def nvfp4_modelopt(packed: np.ndarray, scale: np.ndarray, whole: np.ndarray) -> Fp4Tensor:
    """W = e2m1 * (f32(weight_scale) * weight_scale_2)."""
    return fp4_tensor(packed, scale, GROUP, whole)
