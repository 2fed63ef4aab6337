"""What the Pallas Triton kernels share.

They are written for GB10 (99 KiB of shared memory a block, `mma.sync`) and run on any NVIDIA GPU
of compute capability 8.0 and up. Block shapes are powers of two, as Triton wants them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu


def call(
    body: Any,
    grid: tuple[int, ...],
    out: Any,
    *,
    warps: int = 4,
    stages: int = 1,
    aliases: dict[int, int] | None = None,
    interpret: bool = False,
    name: str | None = None,
) -> Any:
    """A Triton kernel over `grid` whose arguments and results are whole arrays in device memory.

    Args:
      out: shapes and dtypes of the results.
      warps, stages: threads a block / 32, and how many turns of a loop are loaded ahead.
      aliases: argument number -> result number that takes over its memory.
      interpret: run it in jnp on any device (tests).
    """
    return pl.pallas_call(
        body,
        out_shape=out,
        grid=grid,
        input_output_aliases=aliases or {},
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name=name,
    )


def precision(dtype: Any, interpret: bool) -> Any:
    """How `dot` multiplies float32 factors where a model computes in `dtype`: for float32 with all
    their bits (three TF32 products), else with the leading 11 (one TF32 product). Interpreted on a
    CPU: with all."""
    kind = jax.lax.DotAlgorithmPreset
    if interpret:
        return kind.F32_F32_F32
    return kind.TF32_TF32_F32_X3 if dtype == jnp.float32 else kind.TF32_TF32_F32


def dot(a: jax.Array, b: jax.Array, precision: Any = None) -> jax.Array:
    """a @ b in float32; `precision` is for float32 factors, others are multiplied exactly."""
    precision = precision if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


def parts(size: int) -> tuple[tuple[int, int], ...]:
    """`size` as runs (offset, length) whose lengths are falling powers of two: 576 is 512 + 64."""
    found, at = [], 0
    while at < size:
        length = 1 << ((size - at).bit_length() - 1)
        found.append((at, length))
        at += length
    return tuple(found)


def types(**arrays: Any) -> str | None:
    """None if all arrays are bfloat16 or float32, else which is not."""
    for name, array in arrays.items():
        if array is not None and array.dtype not in (jnp.bfloat16, jnp.float32):
            return f"{name} is {array.dtype}; bfloat16 and float32 are supported"
    return None


def power(size: int, least: int = 1) -> int:
    """The smallest power of two that is at least `size` and `least`."""
    return max(least, 1 << max(size - 1, 0).bit_length())


def cells(rows: jax.Array, part: tuple[int, int]) -> tuple[jax.Array, jax.Array]:
    """Indices [R, 1] and [1, length] of channels (offset, length) in rows int32 [R]."""
    at, length = part
    return rows[:, None], at + jnp.arange(length, dtype=jnp.int32)[None, :]


def scalar(x: Any) -> jax.Array:
    """int32 [1], as kernels take a layer number."""
    return jnp.asarray(x, jnp.int32).reshape(1)
