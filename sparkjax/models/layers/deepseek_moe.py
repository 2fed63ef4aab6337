"""The experts of DeepSeek-V4: scores are sqrt(softplus(W x)), the choice is by score plus bias, or
a stored table of token ids (hash routing); a shared expert beside them; all clamped SwiGLUs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ...kernels.linear import linear_float32
from ...mesh.context import Context
from ...mesh.units import channels
from ..batch import Batch
from ..config import ConfigReader
from ..params import Dim, Param, spread
from .mlp import mlp
from .moe import declare_experts, route_noaux, routed
from .shared_moe import Experts


def read_experts(r: ConfigReader) -> Experts:
    r.require("scoring_func", ("sqrtsoftplus",), "sqrtsoftplus")
    r.require("topk_method", ("noaux_tc",), "noaux_tc")
    r.require("norm_topk_prob", (True,), True)
    r.require("n_group", (1,), 1)
    count, k = r.read("n_routed_experts", int, 256), r.read("num_experts_per_tok", int, 6)
    if not 1 <= k <= count:
        raise r.refuse("num_experts_per_tok", k, f"1 to n_routed_experts {count}")
    return Experts(
        count=count,
        width=r.read("moe_intermediate_size", int),
        shared=r.read("n_shared_experts", int, 1),
        k=k,
        scale=r.read("routed_scaling_factor", float, 1.5),
        limit=r.read("swiglu_limit", float, 10.0),
    )


def declare_moe(
    experts: Experts,
    hidden: int,
    layers: tuple[int, ...],
    prefix: str,
    ranks: int,
    *,
    hashed: tuple[int, ...] = (),
    vocab: int = 0,
) -> dict[str, Any]:
    """Parameters under `prefix` (with `{layer}`); the router is on every rank.

    Args:
      hashed: those of the layers whose experts are looked up by token id.
    """
    embed, count = Dim(hidden, "embed"), Dim(experts.count)
    chosen = tuple(layer for layer in layers if layer not in hashed)
    tree: dict[str, Any] = {
        "gate": Param(f"{prefix}.gate.weight", (count, embed), layers),
        "experts": declare_experts(
            hidden,
            experts.width,
            experts.count,
            layers,
            f"{prefix}.experts",
            ranks,
            names=("w1", "w3", "w2"),
        ),
    }
    if chosen:
        bias = f"{prefix}.gate.bias"
        tree["bias"] = Param(bias, (count,), chosen, dtype="float32", init="zeros")
    if hashed:
        table, dims = f"{prefix}.gate.tid2eid", (Dim(vocab), Dim(experts.k))
        tree["table"] = Param(table, dims, hashed, dtype="int32", init="zeros")
    if experts.shared:
        ffn, name = spread(channels(experts.width * experts.shared, ranks), "ffn"), f"{prefix}.shared_experts"
        tree["shared"] = {
            "gate": Param(f"{name}.w1.weight", (ffn, embed), layers),
            "up": Param(f"{name}.w3.weight", (ffn, embed), layers),
            "down": Param(f"{name}.w2.weight", (embed, ffn), layers),
        }
    return tree


def moe(
    x: jax.Array,
    p: dict[str, Any],
    at: Any,
    experts: Experts,
    batch: Batch,
    context: Context,
    *,
    bias_at: Any = None,
    table_at: Any = None,
) -> jax.Array:
    """sum_e w_e expert_e(x) + shared(x), over normalised x [B, Q, H].

    Args:
      at: this layer's place among all; `bias_at` among those with a bias, or `table_at` among the
        hashed ones.
    """
    scores = jnp.sqrt(jax.nn.softplus(linear_float32(x, p["gate"], at, context=context)))
    if table_at is None:
        bias = p["bias"][bias_at]
        ids, weights = route_noaux(scores, bias, experts.k, scale=experts.scale)
    else:
        ids = p["table"][table_at, batch.tokens]
        weights = jnp.take_along_axis(scores, ids, axis=-1)
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20) * experts.scale
    y = routed(x, p["experts"], at, ids, weights, batch, limit=experts.limit, context=context)
    if "shared" in p:
        y = y + mlp(x, p["shared"], at, batch, context, limit=experts.limit, reduce=False)
    return context.all_reduce(y)
