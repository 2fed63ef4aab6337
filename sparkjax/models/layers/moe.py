"""Mixture of experts as a layer: routing variants, expert and shared-expert parameters."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ...kernels import moe as moe_kernel
from ...mesh.context import Context
from ...mesh.units import channels
from ..batch import Batch
from ..params import Dim, Param, Part, spread
from .mlp import ACTIVATIONS


def declare_experts(
    hidden: int,
    width: int,
    count: int,
    layers: tuple[int, ...],
    prefix: str,
    ranks: int,
    *,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    fused: bool = True,
) -> dict[str, Param]:
    """Routed experts under `prefix` (with `{layer}`), each sliced on its intermediate dimension.

    Args:
      width: intermediate width of one expert.
      names: the checkpoint's names of gate, up and down.
      fused: also accept `{prefix}.gate_up_proj` [E, 2I, H] (gate rows first) and
        `{prefix}.down_proj` [E, H, I].
    """
    embed, ffn = Dim(hidden, "embed"), spread(channels(width, ranks), "ffn")
    gate, up, down = (f"{prefix}.{{expert}}.{name}.weight" for name in names)
    also: dict[str, tuple[Part, ...]] = {"gate": (), "up": (), "down": ()}
    if fused:
        also = {
            "gate": (Part(f"{prefix}.gate_up_proj", ((0, width),)),),
            "up": (Part(f"{prefix}.gate_up_proj", ((width, 2 * width),)),),
            "down": (Part(f"{prefix}.down_proj", ((0, hidden),)),),
        }
    return {
        "gate": Param(gate, (ffn, embed), layers, count, also=also["gate"]),
        "up": Param(up, (ffn, embed), layers, count, also=also["up"]),
        "down": Param(down, (embed, ffn), layers, count, also=also["down"]),
    }


def top_k(scores: jax.Array, k: int) -> jax.Array:
    """int32 [..., k]: the k highest scores; higher first, then the lower index."""
    return jax.lax.top_k(scores, k)[1].astype(jnp.int32)


def route_noaux(
    scores: jax.Array,
    bias: jax.Array | None,
    k: int,
    *,
    groups: int = 1,
    kept_groups: int = 1,
    normalise: bool = True,
    scale: float = 1.0,
    eps: float = 1e-20,
) -> tuple[jax.Array, jax.Array]:
    """Auxiliary-loss-free routing (DeepSeek-V3): chosen by score plus bias, weighted by score.

    Args:
      scores: float32 [..., E], positive (sigmoid, or sqrt softplus, of the logits).
      bias: float32 [E], used for the choice only, or None.
      groups, kept_groups: experts form consecutive groups, a group scores the sum of its two
        best, and only the best `kept_groups` groups are eligible.

    Returns:
      (ids int32 [..., k], weights float32 [..., k]).
    """
    choice = scores if bias is None else scores + bias
    if groups > 1:
        grouped = choice.reshape(*choice.shape[:-1], groups, -1)
        best = jax.lax.top_k(grouped, 2)[0].sum(-1)
        kept = top_k(best, kept_groups)
        eligible = (kept[..., None] == jnp.arange(groups)).any(-2)
        choice = jnp.where(eligible[..., None], grouped, -jnp.inf).reshape(choice.shape)
    ids = top_k(choice, k)
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    if normalise:
        weights = weights / (weights.sum(-1, keepdims=True) + eps)
    return ids, weights * scale


def route_softmax(logits: jax.Array, k: int, normalise: bool = True) -> tuple[jax.Array, jax.Array]:
    """Top k of the softmax over all experts, renormalised. logits: [..., E]."""
    p = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    weights, ids = jax.lax.top_k(p, k)
    if normalise:
        weights = weights / weights.sum(-1, keepdims=True)
    return ids.astype(jnp.int32), weights


def routed(
    x: jax.Array,
    p: dict[str, Any],
    at: Any,
    ids: jax.Array,
    weights: jax.Array,
    batch: Batch,
    activation: str = "silu",
    limit: float | None = None,
    *,
    context: Context,
) -> jax.Array:
    """The routed experts' sum over this rank's slices, [B, Q, H]: add the shared expert's slice
    and then `context.all_reduce` once. Zeros for tokens that are not real.

    Args:
      x: [B, Q, H]; ids, weights: [B, Q, k].
      at: this layer's place in the stacked parameters.
    """
    b, q, hidden = x.shape
    k = ids.shape[-1]
    # A closed row would have its own experts read: at one stream as many bytes as the open one's.
    ids = jnp.where(batch.valid[..., None], ids, -1)
    y = moe_kernel.experts(
        x.reshape(b * q, hidden),
        ids.reshape(b * q, k),
        weights.reshape(b * q, k).astype(jnp.float32),
        p["gate"],
        p["up"],
        p["down"],
        at,
        ACTIVATIONS[activation],
        limit,
        context=context,
    )
    return y.reshape(b, q, hidden)
