"""Routed experts beside a shared one, chosen without an auxiliary loss (DeepSeek-V3, GLM)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ...kernels.linear import linear_float32
from ...mesh.context import Context
from ..batch import Batch
from ..config import ConfigReader
from ..params import Dim, Param
from .mlp import declare_mlp, mlp
from .moe import declare_experts, route_noaux, routed

DENSE, SPARSE = "dense", "sparse"
"""Layers with a plain MLP, and layers with experts."""


@dataclasses.dataclass(frozen=True)
class Experts:
    """Shapes and routing of one expert layer.

    Attributes:
      width: of one expert; the shared one is `shared` times as wide (0: there is none).
      k: experts a token.
      limit: clamp of the clamped SwiGLU, or None.
    """

    count: int
    width: int
    shared: int
    k: int
    groups: int = 1
    kept_groups: int = 1
    normalise: bool = True
    scale: float = 1.0
    limit: float | None = None


NO_EXPERTS = Experts(count=0, width=0, shared=0, k=0)
"""Of a model whose layers are all dense."""


def read_experts(r: ConfigReader, limit: float | None = None) -> Experts:
    """The fields that the GLM configs use."""
    r.require("scoring_func", ("sigmoid",), "sigmoid")
    r.require("topk_method", ("noaux_tc",), "noaux_tc")
    r.require("moe_layer_freq", (1,), 1)
    count = r.read("n_routed_experts", int, None, also=("num_local_experts", "num_experts"))
    if count is None:
        raise r.refuse("n_routed_experts", None, "a number of experts")
    groups, k = r.read("n_group", int, 1, least=1), r.read("num_experts_per_tok", int)
    kept = r.read("topk_group", int, 1)
    if count % groups:
        raise r.refuse("n_group", groups, f"divisors of n_routed_experts {count}")
    if not 1 <= kept <= groups:
        raise r.refuse("topk_group", kept, f"1 to n_group {groups}")
    if not 1 <= k <= count // groups * kept:
        raise r.refuse("num_experts_per_tok", k, f"1 to {count // groups * kept}")
    return Experts(
        count=count,
        width=r.read("moe_intermediate_size", int),
        shared=r.read("n_shared_experts", int, 1),
        k=k,
        groups=groups,
        kept_groups=kept,
        normalise=r.read("norm_topk_prob", bool, True),
        scale=r.read("routed_scaling_factor", float, 1.0),
        limit=limit,
    )


def read_mlp_types(r: ConfigReader, layers: int) -> tuple[str, ...]:
    """`mlp_layer_types`, or the first `first_k_dense_replace` dense."""
    types = r.read("mlp_layer_types", list, None)
    if types is None:
        dense = min(r.read("first_k_dense_replace", int, 3), layers)
        types = [DENSE] * dense + [SPARSE] * (layers - dense)
    if len(types) != layers or not set(types) <= {DENSE, SPARSE}:
        raise r.refuse("mlp_layer_types", types, f"{layers} entries of {DENSE} or {SPARSE}")
    return tuple(types)


def declare_moe(
    experts: Experts, hidden: int, layers: tuple[int, ...], prefix: str, ranks: int
) -> dict[str, Any]:
    """Parameters under `prefix` (with `{layer}`); the router is on every rank."""
    count = Dim(experts.count)
    tree: dict[str, Any] = {
        "gate": Param(f"{prefix}.gate.weight", (count, Dim(hidden, "embed")), layers),
        "bias": Param(
            f"{prefix}.gate.e_score_correction_bias", (count,), layers, dtype="float32", init="zeros"
        ),
        "experts": declare_experts(
            hidden, experts.width, experts.count, layers, f"{prefix}.experts", ranks
        ),
    }
    if experts.shared:
        width = experts.width * experts.shared
        tree["shared"] = declare_mlp(hidden, width, layers, f"{prefix}.shared_experts", ranks)
    return tree


def moe(
    x: jax.Array, p: dict[str, Any], at: Any, experts: Experts, batch: Batch, context: Context
) -> jax.Array:
    """sum_e w_e expert_e(x) + shared(x), over normalised x [B, Q, H]; w from
    s = sigmoid(W x) in float32 as in `route_noaux`."""
    scores = jax.nn.sigmoid(linear_float32(x, p["gate"], at, context=context))
    ids, weights = route_noaux(
        scores,
        p["bias"][at].astype(jnp.float32),
        experts.k,
        groups=experts.groups,
        kept_groups=experts.kept_groups,
        normalise=experts.normalise,
        scale=experts.scale,
    )
    y = routed(x, p["experts"], at, ids, weights, batch, limit=experts.limit, context=context)
    if "shared" in p:
        y = y + mlp(x, p["shared"], at, batch, context, limit=experts.limit, reduce=False)
    return context.all_reduce(y)
