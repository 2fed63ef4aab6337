"""Random weights in every format that the GPU kernels read, small, made on the host."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from sparkjax.weights import formats
from sparkjax.weights.formats import (
    awq,
    bf16,
    exl3,
    fp4,
    gguf,
    gptq,
    int8,
    mxfp8,
    nvfp4,
    ordered,
    packed,
    scaled,
)

FORMATS = (
    "bf16", "fp8 tensor", "fp8 channel", "fp8 block", "fp8 e8m0", "fp8 by 32", "mxfp8", "int8",
    "int8 words", "nvfp4", "nvfp4 divided", "mxfp4", "int4", "int4 channel", "gptq v1", "gptq v2",
    "gptq 3 bits", "awq", "bf16 in 12 bits",
)  # fmt: skip
VARIANTS = (
    "int8 zeros", "int8 tensor zero", "int4 zeros", "int4 zero bytes", "int8 words zeros",
    "int4 by 32", "int8 words by 16", "awq by 32", "awq channel", "gptq 2 bits", "gptq 5 bits",
    "gptq 6 bits v2", "gptq 7 bits", "gptq 8 bits", "gptq 8 bits v2", "gptq 3 bits planar",
    "gptq 5 bits planar", "gptq 6 bits planar", "gptq 7 bits planar", "gptq 7 bits planar by 32",
    "gptq 3 bits by 32", "gptq 5 bits channel", "gptq 4 bits ordered", "int4 ordered",
)  # fmt: skip
"""Of integers: other widths, groups, layouts and zero points."""
EXL3 = (
    "exl3 4 mcg", "exl3 1.5 mul1", "exl3 3 3inst", "exl3 1 3inst", "exl3 2 mcg", "exl3 2.5 mul1",
    "exl3 3.5 mul1", "exl3 4.5 mul1", "exl3 5 mcg", "exl3 5.5 mul1", "exl3 6 3inst",
    "exl3 6.5 mul1", "exl3 7 mcg", "exl3 7.5 mul1", "exl3 8 mul1", "exl3 3 mcg/e4m3",
)  # fmt: skip
"""Bits a weight, the codebook, and whether values are rounded to E4M3."""
GGUF = ("gguf Q4_1", "gguf Q4_0", "gguf Q8_0", "gguf Q4_K", "gguf Q6_K")
HALVES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,)}
"""Where the float16 of a GGUF block stand."""


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

    def signed(*shape: int) -> np.ndarray:
        return data(*shape).view(np.int8)

    name, size = kind, 128
    for suffix, of in ((" by 32", 32), (" by 16", 16), (" channel", k)):
        if kind.endswith(suffix) and not kind.startswith("fp8"):
            name, size = kind.removesuffix(suffix), of
    grid, groups = (-(-n // 128), -(-k // 128)), -(-k // size)

    def integers(width: int, zero: Any = None, dtype: Any = np.float32) -> Any:
        scales = scale(n, groups, dtype=dtype)
        return packed.packed_tensor(words(n, k * width // 32), scales, k, zero, group=size)

    def in_gptq(width: int, minus_one: bool = False, planar: bool = False) -> Any:
        return gptq.gptq_tensor(
            words(k * width // 32, n), words(groups, -(-n * width // 32)),
            scale(groups, n, dtype=np.float16), group=size, minus_one=minus_one, planar=planar,
            width=width,
        )  # fmt: skip

    def in_awq() -> Any:
        scales = scale(groups, n, dtype=np.float16)
        return awq.awq_tensor(words(k, n // 8), words(groups, n // 8), scales, size)

    def twelve_bits() -> Any:
        # Rows of few escapes and of many: small numbers, large ones and zeros.
        wide = rng.standard_normal((*lead, n, k)) * np.exp2(rng.integers(-3, 4, (*lead, n, 1)))
        wide *= np.where(rng.random((*lead, n, k)) < 0.01, 2.0**-30, 1)
        wide = np.where(rng.random((*lead, n, k)) < 0.01, 0, wide).reshape(-1, n, k)
        nodes = [bf16.bf16_tensor(w, always=True) for w in wide.astype(ml_dtypes.bfloat16)]
        return formats.stack(nodes, lead)

    made: dict[str, Any] = {
        "bf16": lambda: rng.standard_normal((*lead, n, k)).astype(ml_dtypes.bfloat16),
        "bf16 in 12 bits": twelve_bits,
        "fp8 tensor": lambda: scaled.scaled_tensor(fp8(), scale(1, 1), (0, 0)),
        "fp8 channel": lambda: scaled.scaled_tensor(fp8(), scale(n, 1), (1, 0)),
        "fp8 block": lambda: scaled.scaled_tensor(fp8(), scale(*grid), (128, 128)),
        "fp8 e8m0": lambda: scaled.scaled_tensor(fp8(), powers(*grid), (128, 128)),
        "fp8 by 32": lambda: scaled.scaled_tensor(fp8(), powers(-(-n // 32), -(-k // 32)), (32, 32)),
        "mxfp8": lambda: mxfp8.mxfp8_tensor(fp8(), powers(n, k // 32)),
        "int8": lambda: int8.int8_tensor(signed(n, k), scale(n, 1)),
        "int8 zeros": lambda: int8.int8_tensor(signed(n, k), scale(n, 1), signed(n, 1)),
        "int8 tensor zero": lambda: scaled.scaled_tensor(
            signed(n, k), scale(1, 1), (0, 0), signed(1, 1)
        ),
        "nvfp4": lambda: nvfp4.nvfp4_modelopt(data(n, k // 2), positive(), whole()),
        "nvfp4 divided": lambda: nvfp4.nvfp4_compressed(data(n, k // 2), positive(), whole()),
        "mxfp4": lambda: fp4.fp4_tensor(data(n, k // 2), powers(n, k // 32), 32),
        "int4": lambda: integers(4, dtype=ml_dtypes.bfloat16),
        "int4 zeros": lambda: integers(4, words(-(-n // 8), groups)),
        "int4 zero bytes": lambda: integers(4, (signed(n, groups) >> 4).astype(np.int8)),
        "int8 words": lambda: integers(8),
        "int8 words zeros": lambda: integers(8, words(n // 4, groups)),
        "gptq v1": lambda: in_gptq(4, minus_one=True),
        "gptq v2": lambda: in_gptq(4),
        "awq": in_awq,
    }
    if kind.startswith("gguf"):
        _, name = kind.split()
        found = data(n, k // gguf.KINDS[name].elements, gguf.KINDS[name].nbytes)
        for at in HALVES[name]:
            found[..., at : at + 2] = scale(*found.shape[-3:-1], 1, dtype=np.float16).view(np.uint8)
        return gguf.GGUFTensor(jnp.asarray(found.reshape(*lead, n, -1)), name)
    if kind.startswith("exl3"):
        _, rate, book = kind.split()
        tiles = rng.integers(
            -(2**15), 2**15, (*lead, -(-n // 128) * 8, -(-k // 128) * 8, int(float(rate) * 16))
        )
        node = exl3.Exl3Tensor(
            tiles.astype(np.int16), scale(tiles.shape[-3] * 16, 1, dtype=np.float16),
            scale(1, tiles.shape[-2] * 16, dtype=np.float16), book.removesuffix("/e4m3"),
            book.endswith("/e4m3"), n, k,
        )  # fmt: skip
        return jax.tree.map(jnp.asarray, node)

    def sorted_inputs(node: Any) -> Any:
        # A matrix with an order of groups at a time, as they are loaded.
        groups = rng.permutation(np.arange(k) // size).astype(np.int32)[None]
        found = []
        for at in np.ndindex(lead):
            member = jax.tree.map(lambda plane, at=at: plane[at], node)
            found.append(ordered.in_order(member.replace(groups=groups, group=0)))
        return formats.stack(found, lead)

    made["gptq 4 bits ordered"] = lambda: sorted_inputs(in_gptq(4, minus_one=True))
    made["int4 ordered"] = lambda: sorted_inputs(integers(4, words(-(-n // 8), groups)))
    for width in (2, 3, 5, 6, 7, 8):
        made[f"gptq {width} bits"] = partial(in_gptq, width, minus_one=True)
        made[f"gptq {width} bits v2"] = partial(in_gptq, width)
        made[f"gptq {width} bits planar"] = partial(in_gptq, width, planar=True)
    return jax.tree.map(jnp.asarray, made[name]())


def stacked(
    kinds: tuple[str, ...],
    lead: tuple[int, ...],
    n: int,
    k: int,
    axis: int = formats.ROWS,
    cut: tuple[int, int] | None = None,
    seed: int = 0,
) -> Any:
    """Weights [*lead, n, k] of these kinds in turn.

    Args:
      cut: only these rows (or columns, by `axis`) of each, as loading cuts them.
    """
    members = []
    for i in range(int(np.prod(lead))):
        node = jax.tree.map(np.asarray, weight(kinds[i % len(kinds)], (), n, k, seed + i))
        members.append(node if cut is None else formats.pick(node, axis, np.arange(*cut)))
    return jax.tree.map(jnp.asarray, formats.stack(members, lead))


def rows(count: int, k: int, seed: int = 1) -> jax.Array:
    """bfloat16 [count, k]."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal((count, k)), jnp.bfloat16)


def relative(out: jax.Array, reference: jax.Array) -> float:
    """norm(out - reference) / norm(reference)."""
    a, b = (np.asarray(v.astype(jnp.float32), np.float64) for v in (out, reference))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))
