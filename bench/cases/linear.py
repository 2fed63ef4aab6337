"""Cases of `linear`: decode at one, eight and 64 rows, small matrices, prefill at 2,048 rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from cases._weights import FORMATS, size, weight
from kernel_case import Case

from sparkjax.kernels.linear import linear, reference
from sparkjax.mesh.context import Context

CONTEXT = Context("bfloat16", platform="cuda")
LARGE = {"bf16": (8192, 8192), "fp8 channel": (8192, 8192), "fp8 block": (8192, 8192),
         "mxfp8": (8192, 8192), "int8": (8192, 8192), "bf16 in 12 bits": (8192, 8192)}  # fmt: skip
FOUR_BITS = (8192, 16384)
WANTED = {"bf16": 0.85, "fp8 channel": 0.70, "fp8 block": 0.70}
"""Share of copy bandwidth at one row; 0.40 where nothing is said, and 0.8 of it at eight rows."""
SMALL = (("bf16", 4096, 1536), ("fp8 block", 4096, 4096), ("nvfp4", 4096, 4096))
MANY = 2048
PREFILL = ("bf16", "bf16 in 12 bits", "fp8 block", "nvfp4", "mxfp4", "int4", "awq", "exl3")


def cases() -> list[Case]:
    found = []
    for kind in FORMATS:
        for rows, share in ((1, 1.0), (8, 0.8)):
            found.append(_decode(kind, *LARGE.get(kind, FOUR_BITS), rows, share))
    for kind in ("bf16", "fp8 block", "nvfp4", "int4"):
        found.append(_decode(kind, *LARGE.get(kind, FOUR_BITS), 64, None))
    found += [_decode(kind, n, k, 1, 1.0) for kind, n, k in SMALL]
    found += [_prefill(kind) for kind in PREFILL]
    return found


def _build(key: jax.Array, kind: str, n: int, k: int, rows: int) -> Any:
    a, b = jax.random.split(key)
    return jax.random.normal(b, (rows, k), jnp.bfloat16), weight(a, kind, (), n, k)


def _run(x: jax.Array, w: Any) -> jax.Array:
    return linear(x, w, context=CONTEXT)


def _exact(x: jax.Array, w: Any) -> jax.Array:
    """In float32, with weights and sums as they are."""
    return reference.linear(x.astype(jnp.float32), w)


def _decode(kind: str, n: int, k: int, rows: int, share: float | None) -> Case:
    target = None if share is None else WANTED.get(kind, 0.40) * share
    return Case(
        "linear", f"{kind} {n}x{k} rows {rows}", partial(_build, kind=kind, n=n, k=k, rows=rows),
        _run, _exact, size(kind, n, k) + 2 * rows * (n + k), 2 * rows * n * k,
        target=target, peer=partial(_peer, kind=kind, n=n, k=k, rows=rows),
    )  # fmt: skip


def _prefill(kind: str) -> Case:
    n = k = 8192
    return Case(
        "linear", f"{kind} {n}x{k} rows {MANY}", partial(_build, kind=kind, n=n, k=k, rows=MANY),
        # Weights are rounded to bfloat16, as the reference does for bfloat16 rows; EXL3's stay float16.
        _run, _exact if kind.startswith("exl3") else reference.linear, size(kind, n, k) + 2 * MANY * (n + k), 2 * MANY * n * k,
        target=0.5, bound="flops", peer=partial(_peer, kind=kind, n=n, k=k, rows=MANY),
    )  # fmt: skip


def _peer(torch: Any, count: int, kind: str, n: int, k: int, rows: int) -> list[Callable[[], Any]]:
    """PyTorch's own kernel for the same work on random data; raises where it has none."""
    bf16, device = torch.bfloat16, "cuda"
    x = torch.randn(rows, k, dtype=bf16, device=device)
    if kind == "bf16":
        ws = [torch.randn(n, k, dtype=bf16, device=device) for _ in range(count)]
        return [partial(torch.nn.functional.linear, x, w) for w in ws]
    if kind == "int4":
        planes = [torch.randint(0, 255, (n, k // 2), device=device, dtype=torch.uint8)
                  for _ in range(count)]  # fmt: skip
        ws = [torch.ops.aten._convert_weight_to_int4pack(p, 8) for p in planes]
        scales = torch.rand(k // 128, n, 2, dtype=bf16, device=device)
        return [partial(torch.ops.aten._weight_int4pack_mm, x, w, 128, scales) for w in ws]
    if kind == "int8":
        ws = [torch.randint(-128, 128, (n, k), device=device, dtype=torch.int8)
              for _ in range(count)]  # fmt: skip
        scales = torch.rand(n, dtype=bf16, device=device)
        return [partial(torch._weight_int8pack_mm, x, w, scales) for w in ws]
    if kind == "fp8 channel":
        # It multiplies FP8 by FP8, and takes sixteen rows at least.
        fp8 = torch.float8_e4m3fn
        few = max(rows, 16)
        xs = torch.randn(few, k, device=device).to(fp8)
        ws = [torch.randn(n, k, dtype=bf16, device=device).to(fp8).t() for _ in range(count)]
        a, b = torch.ones(few, 1, device=device), torch.ones(1, n, device=device)
        return [partial(torch._scaled_mm, xs, w, a, b, out_dtype=bf16) for w in ws]
    raise ValueError("none")
