"""What tensors a publisher writes for one weight [N, K], by layout.

The layouts that `checkpoints/*.yaml` name. Detection (`detect`) reads them back; a test holds that
the two agree.
"""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np

from .detect import Tensors

Written = dict[str, tuple[np.dtype, tuple[int, ...]]]
_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
_BF16 = np.dtype(ml_dtypes.bfloat16)
_F32, _F16 = np.dtype("float32"), np.dtype("float16")
_U8, _I8, _I16, _I32, _I64 = (np.dtype(t) for t in ("uint8", "int8", "int16", "int32", "int64"))


def _up(n: int, size: int) -> int:
    return -(-n // size)


def _fp8_block(scale: np.dtype, suffix: str, block: int = 128) -> Callable[..., Written]:
    def write(module: str, n: int, k: int) -> Written:
        grid = (_up(n, block), _up(k, block))
        return {f"{module}.weight": (_E4M3, (n, k)), f"{module}.{suffix}": (scale, grid)}

    return write


def _fp8_channel(module: str, n: int, k: int) -> Written:
    return {f"{module}.weight": (_E4M3, (n, k)), f"{module}.weight_scale": (_F32, (n, 1))}


def _nvfp4_modelopt(module: str, n: int, k: int) -> Written:
    return {
        f"{module}.weight": (_U8, (n, k // 2)),
        f"{module}.weight_scale": (_E4M3, (n, k // 16)),
        f"{module}.weight_scale_2": (_F32, ()),
        f"{module}.input_scale": (_F32, ()),
    }


def _nvfp4_compressed(module: str, n: int, k: int) -> Written:
    return {
        f"{module}.weight_packed": (_U8, (n, k // 2)),
        f"{module}.weight_scale": (_E4M3, (n, k // 16)),
        f"{module}.weight_global_scale": (_F32, (1,)),
    }


def _mxfp4_deepseek(module: str, n: int, k: int) -> Written:
    return {f"{module}.weight": (_I8, (n, k // 2)), f"{module}.scale": (_E8M0, (n, k // 32))}


def _mxfp4(module: str, n: int, k: int) -> Written:
    return {f"{module}.weight": (_U8, (n, k // 2)), f"{module}.weight_scale": (_U8, (n, k // 32))}


def _pack_quantized(bits: int, group: int) -> Callable[..., Written]:
    def write(module: str, n: int, k: int) -> Written:
        return {
            f"{module}.weight_packed": (_I32, (n, _up(k * bits, 32))),
            f"{module}.weight_scale": (_BF16, (n, _up(k, group))),
            f"{module}.weight_shape": (_I64, (2,)),
        }

    return write


def _gptq(bits: int, group: int) -> Callable[..., Written]:
    def write(module: str, n: int, k: int) -> Written:
        return {
            f"{module}.qweight": (_I32, (k * bits // 32, n)),
            f"{module}.qzeros": (_I32, (_up(k, group), n * bits // 32)),
            f"{module}.scales": (_F16, (_up(k, group), n)),
        }

    return write


def _exl3(bits: float) -> Callable[..., Written]:
    """16 x 16 tiles of `bits` a weight, and the signs and scales of both sides."""

    def write(module: str, n: int, k: int) -> Written:
        return {
            f"{module}.trellis": (_I16, (k // 16, n // 16, int(16 * bits))),
            f"{module}.suh": (_F16, (k,)),
            f"{module}.svh": (_F16, (n,)),
        }

    return write


LAYOUTS: dict[str, Callable[..., Written]] = {
    "fp8-block": _fp8_block(_F32, "weight_scale_inv"),
    "fp8-block-bf16": _fp8_block(_BF16, "weight_scale_inv"),
    "fp8-block-e8m0": _fp8_block(_E8M0, "scale"),
    "fp8-block32-e8m0": _fp8_block(_E8M0, "scale", 32),
    "fp8-channel": _fp8_channel,
    "nvfp4-modelopt": _nvfp4_modelopt,
    "nvfp4-compressed": _nvfp4_compressed,
    "mxfp4-deepseek": _mxfp4_deepseek,
    "mxfp4": _mxfp4,
    "int4-g64": _pack_quantized(4, 64),
    "int8-g64": _pack_quantized(8, 64),
    "gptq-int4-g128": _gptq(4, 128),
    "gptq-int8-g128": _gptq(8, 128),
    "exl3-2": _exl3(2),
    "exl3-2.5": _exl3(2.5),
    "exl3-3": _exl3(3),
    "exl3-3.5": _exl3(3.5),
    "exl3-4": _exl3(4),
    "exl3-6": _exl3(6),
}
"""Layout name -> function of (module, N, K) to the tensors that lie in the file."""


def written(layout: str, name: str, n: int, k: int) -> Tensors:
    """The tensors of the weight `name` ("X.weight") of [n, k] numbers in a layout.

    Raises:
      ValueError: there is no such layout; names those there are.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r} is none of {', '.join(LAYOUTS)}")
    return LAYOUTS[layout](name.removesuffix(".weight"), n, k)
