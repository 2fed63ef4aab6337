"""Routed experts beside a gated shared one, chosen by a softmax (Qwen2-MoE and its successors).

    y = sum_e w_e expert_e(x) + sigmoid(w_g . x) shared(x)

with w the top k of softmax(W x), renormalised.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from ...kernels.linear import linear_float32
from ...mesh.context import Context
from ..batch import Batch
from ..config import ConfigReader
from ..params import Dim, Param
from .mlp import declare_mlp, mlp
from .moe import declare_experts, route_softmax, routed


@dataclasses.dataclass(frozen=True)
class GatedExperts:
    """Shapes and routing of one expert layer.

    Attributes:
      width, shared: intermediate width of an expert, and of the shared one.
      k: experts a token.
      normalise: whether the chosen experts' weights are made to sum to 1.
    """

    count: int
    width: int
    shared: int
    k: int
    normalise: bool = True


def read_gated_experts(r: ConfigReader) -> GatedExperts:
    """The fields that the Qwen configs use."""
    count, k = r.read("num_experts", int), r.read("num_experts_per_tok", int)
    if not 1 <= k <= count:
        raise r.refuse("num_experts_per_tok", k, f"1 to num_experts {count}")
    return GatedExperts(
        count=count,
        width=r.read("moe_intermediate_size", int),
        shared=r.read("shared_expert_intermediate_size", int),
        k=k,
        normalise=r.read("norm_topk_prob", bool, True),
    )


def declare_gated_moe(
    experts: GatedExperts, hidden: int, layers: tuple[int, ...], prefix: str, ranks: int
) -> dict[str, Any]:
    """Parameters under `prefix` (with `{layer}`); the router and the gate are on every rank."""
    embed = Dim(hidden, "embed")
    return {
        "gate": Param(f"{prefix}.gate.weight", (Dim(experts.count), embed), layers),
        "experts": declare_experts(
            hidden, experts.width, experts.count, layers, f"{prefix}.experts", ranks
        ),
        "shared": declare_mlp(hidden, experts.shared, layers, f"{prefix}.shared_expert", ranks),
        "shared_gate": Param(f"{prefix}.shared_expert_gate.weight", (Dim(1), embed), layers),
    }


def gated_moe(
    x: jax.Array, p: dict[str, Any], at: Any, experts: GatedExperts, batch: Batch, context: Context
) -> jax.Array:
    """One layer over normalised x [B, Q, H]."""
    logits = linear_float32(x, p["gate"], at, context=context)
    ids, weights = route_softmax(logits, experts.k, experts.normalise)
    y = routed(x, p["experts"], at, ids, weights, batch, context=context)
    shared = mlp(x, p["shared"], at, batch, context, reduce=False)
    gate = jax.nn.sigmoid(linear_float32(x, p["shared_gate"], at, context=context)).astype(x.dtype)
    return context.all_reduce(y + gate * shared)
