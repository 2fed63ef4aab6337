"""Random weights in every format that the GPU kernels read, small, made on the host."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from sparkjax.weights.formats import fp4, gptq, int8, mxfp8, nvfp4, packed, scaled

FORMATS = (
    "bf16", "fp8 tensor", "fp8 channel", "fp8 block", "fp8 e8m0", "mxfp8", "int8", "int8 words",
    "nvfp4", "nvfp4 divided", "mxfp4", "int4", "int4 channel", "gptq v1", "gptq v2",
)  # fmt: skip


def weight(kind: str, lead: tuple[int, ...], n: int, k: int, seed: int = 0) -> Any:
    """A weight [*lead, n, k]; every code and, where that is harmless, every scale occurs."""
    rng = np.random.default_rng(seed)

    def data(*shape: int) -> np.ndarray:
        return rng.integers(0, 256, (*lead, *shape)).astype(np.uint8)

    def words(*shape: int) -> np.ndarray:
        return rng.integers(-(2**31), 2**31, (*lead, *shape)).astype(np.int32)

    def scale(*shape: int, dtype: Any = np.float32) -> np.ndarray:
        return rng.uniform(0.25, 4, (*lead, *shape)).astype(dtype)

    def powers(*shape: int) -> np.ndarray:
        return rng.integers(120, 135, (*lead, *shape)).astype(np.uint8)

    def fp8() -> np.ndarray:
        codes = data(n, k)
        codes[codes & 0x7F == 0x7F] = 0  # NaN
        return codes.view(ml_dtypes.float8_e4m3fn)

    def positive() -> np.ndarray:
        codes = rng.integers(0, 0x7F, (*lead, n, k // 16)).astype(np.uint8)
        return codes.view(ml_dtypes.float8_e4m3fn)

    def whole() -> np.ndarray:
        return rng.uniform(0.25, 4, lead).astype(np.float32)

    grid = (-(-n // 128), -(-k // 128))
    groups = -(-k // 128)
    made: dict[str, Any] = {
        "bf16": lambda: rng.standard_normal((*lead, n, k)).astype(ml_dtypes.bfloat16),
        "fp8 tensor": lambda: scaled.scaled_tensor(fp8(), scale(1, 1), (0, 0)),
        "fp8 channel": lambda: scaled.scaled_tensor(fp8(), scale(n, 1), (1, 0)),
        "fp8 block": lambda: scaled.scaled_tensor(fp8(), scale(*grid), (128, 128)),
        "fp8 e8m0": lambda: scaled.scaled_tensor(fp8(), powers(*grid), (128, 128)),
        "mxfp8": lambda: mxfp8.mxfp8_tensor(fp8(), powers(n, k // 32)),
        "int8": lambda: int8.int8_tensor(data(n, k).view(np.int8), scale(n, 1)),
        "int8 words": lambda: packed.packed_tensor(words(n, k // 4), scale(n, groups), k, group=128),
        "nvfp4": lambda: nvfp4.nvfp4_modelopt(data(n, k // 2), positive(), whole()),
        "nvfp4 divided": lambda: nvfp4.nvfp4_compressed(data(n, k // 2), positive(), whole()),
        "mxfp4": lambda: fp4.fp4_tensor(data(n, k // 2), powers(n, k // 32), 32),
        "int4": lambda: packed.packed_tensor(
            words(n, k // 8), scale(n, groups, dtype=ml_dtypes.bfloat16), k, group=128
        ),
        "int4 channel": lambda: packed.packed_tensor(words(n, k // 8), scale(n, 1), k),
    }
    for version in ("v1", "v2"):
        made[f"gptq {version}"] = lambda version=version: gptq.gptq_tensor(
            words(k // 8, n), words(groups, n // 8), scale(groups, n, dtype=np.float16),
            group=128, minus_one=version == "v1",
        )  # fmt: skip
    return jax.tree.map(jnp.asarray, made[kind]())


def rows(count: int, k: int, seed: int = 1) -> jax.Array:
    """bfloat16 [count, k]."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal((count, k)), jnp.bfloat16)


def relative(out: jax.Array, reference: jax.Array) -> float:
    """norm(out - reference) / norm(reference)."""
    a, b = (np.asarray(v.astype(jnp.float32), np.float64) for v in (out, reference))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))
