"""Gated multi-layer perceptrons (Shazeer 2020)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ...kernels.linear import linear, linear_group
from ...mesh.context import Context
from ...mesh.units import channels
from ..batch import Batch
from ..params import Dim, Param, spread


def silu(x: jax.Array) -> jax.Array:
    """x sigmoid(x), in float32 and rounded once: each step in bfloat16 would round anew."""
    return jax.nn.silu(x.astype(jnp.float32)).astype(x.dtype)


def gelu_tanh(x: jax.Array) -> jax.Array:
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) (Hendrycks and Gimpel 2016)."""
    return jax.nn.gelu(x, approximate=True)


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": silu,
    "gelu_pytorch_tanh": gelu_tanh,
}


def declare_mlp(
    hidden: int, width: int, layers: tuple[int, ...], prefix: str, ranks: int, *, bias: bool = False
) -> dict[str, Param]:
    """gate, up and down projections of width `width` under `prefix` (with `{layer}`)."""
    embed, ffn = Dim(hidden, "embed"), spread(channels(width, ranks), "ffn")
    params = {
        "gate": Param(f"{prefix}.gate_proj.weight", (ffn, embed), layers),
        "up": Param(f"{prefix}.up_proj.weight", (ffn, embed), layers),
        "down": Param(f"{prefix}.down_proj.weight", (embed, ffn), layers),
    }
    if bias:
        for name, dim in (("gate", ffn), ("up", ffn), ("down", embed)):
            params[f"{name}_bias"] = Param(
                f"{prefix}.{name}_proj.bias", (dim,), layers, init="zeros"
            )
    return params


def mlp(
    x: jax.Array,
    p: dict[str, Any],
    at: Any,
    batch: Batch,
    context: Context,
    activation: str = "silu",
    limit: float | None = None,
    reduce: bool = True,
) -> jax.Array:
    """down(act(gate x) * up x), summed over ranks.

    Args:
      x: [B, Q, H].
      at: this layer's place in the stacked parameters.
      limit: clamp of the clamped SwiGLU: gate <= limit, |up| <= limit.
      reduce: sum over ranks; without, the result is this rank's share (a shared expert beside
        routed ones is summed together with them).
    """
    gate, up = linear_group(x, (p["gate"], p["up"]), at, context=context, rows=batch.rows)
    if "gate_bias" in p:
        gate, up = gate + p["gate_bias"][at].astype(x.dtype), up + p["up_bias"][at].astype(x.dtype)
    if limit is not None:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    y = linear(ACTIVATIONS[activation](gate) * up, p["down"], at, context=context, rows=batch.rows)
    y = context.all_reduce(y) if reduce else y
    return y if "down_bias" not in p else y + p["down_bias"][at].astype(x.dtype)
