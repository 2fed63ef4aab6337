"""glm4_moe: grouped-query attention and auxiliary-loss-free experts beside a shared one (GLM-4.5,
4.6, 4.7; Zeng et al. 2025).

A layer is x += attention(norm(x)); x += mlp_or_moe(norm(x)). Rope turns the first half of a head's
channels; queries and keys may have norms and, with values, biases. One more layer predicts the
token after next (`draft`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..kernels.linear import linear
from ..mesh.context import Context
from ..mesh.units import grouped_heads
from . import cache as caches
from .batch import Batch
from .config import ConfigReader, text_section
from .family import Output
from .layers.attention import Heads, attention, declare_attention, declare_kv
from .layers.head import declare_vocabulary, embed_tokens, vocabulary_logits
from .layers.mlp import declare_mlp, mlp
from .layers.norm import rms_norm
from .layers.rope import Rope, angles, read_rope
from .layers.shared_moe import DENSE, SPARSE, Experts, declare_moe, moe, read_experts
from .layers.stack import Layer, lone, pick, run_layers, tap
from .params import Dim, Param, Tree


@dataclasses.dataclass(frozen=True)
class Config:
    vocab: int
    hidden: int
    mlps: tuple[str, ...]
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    experts: Experts
    eps: float
    rope: Rope
    attention_bias: bool
    head_norms: bool
    tied: bool
    drafts: int
    max_positions: int
    eos: tuple[int, ...]

    @property
    def layers(self) -> int:
        return len(self.mlps)

    @property
    def stack(self) -> tuple[int, ...]:
        return tuple(range(self.layers))

    @property
    def draft_stack(self) -> tuple[int, ...]:
        return tuple(range(self.layers, self.layers + self.drafts))

    def of(self, kind: str) -> tuple[int, ...]:
        return tuple(i for i, k in enumerate(self.mlps) if k == kind)

    def attention(self, ranks: int) -> Heads:
        layout = grouped_heads(self.heads, self.kv_heads, ranks)
        return Heads(layout, self.head_dim, self.head_dim, self.head_dim**-0.5, eps=self.eps)


def ignored(config: Config) -> tuple[str, ...]:
    """Copies of the embedding and the head beside the prediction layers, or layers not asked for."""
    last = config.layers + max(config.drafts, 1)
    return tuple(f"model.layers.{i}." for i in range(config.layers, last))


def read_config(values: Mapping[str, Any]) -> Config:
    r = ConfigReader(text_section(values))
    r.require("hidden_act", ("silu",), "silu")
    layers, drafts = r.read("num_hidden_layers", int), r.read("num_nextn_predict_layers", int, 1)
    dense = min(r.read("first_k_dense_replace", int, 1), layers)
    heads, hidden = r.read("num_attention_heads", int), r.read("hidden_size", int)
    head_dim = r.read("head_dim", int, hidden // heads)
    turned = (r.section("rope_parameters") or r.section("rope_scaling") or r).read(
        "partial_rotary_factor", float, r.read("partial_rotary_factor", float, 0.5)
    )
    return Config(
        vocab=r.read("vocab_size", int),
        hidden=hidden,
        mlps=(DENSE,) * dense + (SPARSE,) * (layers - dense),
        heads=heads,
        kv_heads=r.read("num_key_value_heads", int),
        head_dim=head_dim,
        width=r.read("intermediate_size", int) if dense else 0,
        experts=read_experts(r),
        eps=r.read("rms_norm_eps", float, 1e-5),
        rope=read_rope(r, int(head_dim * turned)),
        attention_bias=r.read("attention_bias", bool, False),
        head_norms=r.read("use_qk_norm", bool, False),
        tied=r.read("tie_word_embeddings", bool, False),
        drafts=drafts,
        max_positions=r.read("max_position_embeddings", int, 131072),
        eos=r.tokens("eos_token_id"),
    )


# --- Declarations -------------------------------------------------------------------------------


def _norm(name: str, config: Config, layers: tuple[int, ...]) -> Param:
    dims = (Dim(config.hidden, "embed"),)
    return Param(f"model.layers.{{layer}}.{name}.weight", dims, layers, init="ones")


def _declare_layers(
    config: Config,
    ranks: int,
    layers: tuple[int, ...],
    dense: tuple[int, ...],
    sparse: tuple[int, ...],
) -> Tree:
    prefix, hidden = "model.layers.{layer}", config.hidden
    tree: Tree = {
        "input_norm": _norm("input_layernorm", config, layers),
        "attention": declare_attention(
            config.attention(ranks),
            hidden,
            layers,
            f"{prefix}.self_attn",
            bias=config.attention_bias,
            head_norms=config.head_norms,
        ),
        "post_norm": _norm("post_attention_layernorm", config, layers),
    }
    if dense:
        tree["mlp"] = declare_mlp(hidden, config.width, dense, f"{prefix}.mlp", ranks)
    if sparse:
        tree["moe"] = declare_moe(config.experts, hidden, sparse, f"{prefix}.mlp", ranks)
    return tree


def declare(config: Config, ranks: int) -> Tree:
    sets = config.stack, config.of(DENSE), config.of(SPARSE)
    tree: Tree = {
        "embed": declare_vocabulary(config.vocab, config.hidden, "model.embed_tokens.weight", ranks),
        "layers": _declare_layers(config, ranks, *sets),
        "norm": Param("model.norm.weight", (Dim(config.hidden, "embed"),), init="ones"),
    }
    if not config.tied:
        tree["head"] = declare_vocabulary(config.vocab, config.hidden, "lm_head.weight", ranks)
    return tree


def declare_draft(config: Config, ranks: int) -> Tree:
    """The prediction layers, behind the last one: an expert layer and what joins its inputs."""
    if not config.drafts:
        return {}
    layers = config.draft_stack
    join = (Dim(config.hidden, "embed"), Dim(2 * config.hidden))
    return {
        "embed_norm": _norm("enorm", config, layers),
        "hidden_norm": _norm("hnorm", config, layers),
        "join": Param("model.layers.{layer}.eh_proj.weight", join, layers),
        "norm": _norm("shared_head.norm", config, layers),
        **_declare_layers(config, ranks, layers, (), layers),
    }


def declare_caches(config: Config, ranks: int) -> dict[str, caches.Declaration]:
    return declare_kv(config.attention(ranks), config.stack)


def declare_draft_caches(config: Config, ranks: int) -> dict[str, caches.Declaration]:
    if not config.drafts:
        return {}
    planes = declare_kv(config.attention(ranks), config.draft_stack)
    return {f"draft_{name}": plane for name, plane in planes.items()}


# --- The pass -----------------------------------------------------------------------------------


def _layer(
    x: jax.Array,
    p: Any,
    cache: caches.Caches,
    names: tuple[str, str],
    batch: Batch,
    layer: Layer,
    layers: tuple[int, ...],
    fed_layers: tuple[int, ...],
    config: Config,
    context: Context,
    rope: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array, caches.Caches]:
    """One layer: the new residual, what attention and the MLP added, the caches.

    Args:
      layers, fed_layers: those that p stacks, and those among them with this layer's kind of MLP.
    """
    at = layer.within(layers)
    with jax.named_scope("attention"):
        y = rms_norm(x, p["input_norm"], at, eps=config.eps)
        heads = config.attention(context.ranks)
        mixed, cache = attention(
            y, p["attention"], cache, names, batch, layer, heads, layers, context, rope, layers
        )
        x = x + mixed
    with jax.named_scope("mlp" if layer.kind == DENSE else "moe"):
        y = rms_norm(x, p["post_norm"], at, eps=config.eps)
        at = layer.within(fed_layers)
        if layer.kind == DENSE:
            fed = mlp(y, p["mlp"], at, batch, context)
        else:
            fed = moe(y, p["moe"], at, config.experts, batch, context)
    return x + fed, mixed, fed, cache


def forward(
    params: Any,
    cache: caches.Caches,
    batch: Batch,
    config: Config,
    context: Context,
    taps: tuple[int, ...] = (),
    capture: Collection[str] = (),
) -> Output:
    x = embed_tokens(params["embed"], batch, context)
    rope = angles(config.rope, batch.positions)
    tapped = jnp.zeros((len(taps), *x.shape), x.dtype) if taps else None

    def block(carry: Any, layer: Layer) -> Any:
        x, cache, tapped = carry
        sets = config.stack, config.of(layer.kind)
        x, mixed, fed, cache = _layer(
            x, params["layers"], cache, ("k", "v"), batch, layer, *sets, config, context, rope
        )
        seen = {"mixer_out": mixed, "mlp_out": fed, "residual": x}
        return (x, cache, tap(tapped, taps, layer, x)), pick(seen, capture)

    first = pick({"embed": x}, capture)
    (x, cache, tapped), captured = run_layers(config.mlps, block, (x, cache, tapped))
    return Output(x, tapped, cache, first | captured)


def draft(
    params: Any,
    cache: caches.Caches,
    batch: Batch,
    hidden: jax.Array,
    config: Config,
    context: Context,
    depth: int = 0,
) -> tuple[jax.Array, jax.Array, caches.Caches]:
    """x = eh_proj [enorm(embed(next token)) | hnorm(hidden)], one layer, norm, the main head.

    Args:
      batch: `tokens[b, t]` follows the token whose state is `hidden[b, t]`.
      hidden: [B, Q, H] after the final norm, or what the previous depth returned.
      depth: which prediction layer; they take turns.

    Returns:
      (float32 logits [B, Q, vocab], what the next depth reads, caches).
    """
    p, at, layers = params["draft"], depth % config.drafts, config.draft_stack
    with jax.named_scope("draft"):
        e = rms_norm(embed_tokens(params["embed"], batch, context), p["embed_norm"], at, eps=config.eps)
        h = rms_norm(hidden.astype(e.dtype), p["hidden_norm"], at, eps=config.eps)
        x = linear(jnp.concatenate([e, h], -1), p["join"], at, context=context, rows=batch.rows)
        layer, names = lone(SPARSE, layers[at]), ("draft_k", "draft_v")
        rope = angles(config.rope, batch.positions)
        x, _, _, cache = _layer(
            x, p, cache, names, batch, layer, layers, layers, config, context, rope
        )
        carry = rms_norm(x, p["norm"], at, eps=config.eps)
        out = vocabulary_logits(carry, params.get("head", params["embed"]), config.vocab, context)
    return out, carry, cache


def final(params: Any, residual: jax.Array, config: Config, context: Context) -> jax.Array:
    return rms_norm(residual, params["norm"], eps=config.eps)


def logits(
    params: Any,
    residual: jax.Array,
    config: Config,
    context: Context,
    rows: jax.Array | None = None,
) -> jax.Array:
    x = final(params, residual, config, context)
    return vocabulary_logits(x, params.get("head", params["embed"]), config.vocab, context, rows)
