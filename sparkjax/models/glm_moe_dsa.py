"""glm_moe_dsa: latent attention over tokens that an indexer picks, shared between layers, and
auxiliary-loss-free experts beside a shared one (GLM-5, 5.1, 5.2, 5.3).

A layer is x += mla(norm(x)); x += mlp_or_moe(norm(x)). "full" layers run an indexer; "shared" ones
attend to what the latest full layer picked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..kernels.linear import linear
from ..mesh.context import Context
from . import cache as caches
from .batch import Batch
from .config import ConfigReader, text_section
from .family import Output
from .layers.head import declare_vocabulary, embed_tokens, vocabulary_logits
from .layers.indexer import FULL, Index, declare_indexer, read_indexer_types, select_tokens
from .layers.mla import Latent, declare_latents, declare_mla, latents, mla
from .layers.mlp import declare_mlp, mlp
from .layers.norm import rms_norm
from .layers.rope import Rope, angles, read_rope, yarn_mscale
from .layers.shared_moe import (
    DENSE,
    NO_EXPERTS,
    SPARSE,
    Experts,
    declare_moe,
    moe,
    read_experts,
    read_mlp_types,
)
from .layers.stack import Layer, pick, run_layers, tap
from .params import Dim, Param, Tree

LATENT_EPS = 1e-6
"""The published model builds its two latent norms with this, whatever rms_norm_eps says."""


@dataclasses.dataclass(frozen=True)
class Config:
    vocab: int
    hidden: int
    indexers: tuple[str, ...]
    mlps: tuple[str, ...]
    latent: Latent
    index: Index
    width: int
    experts: Experts
    eps: float
    rope: Rope
    tied: bool
    drafts: int
    max_positions: int
    eos: tuple[int, ...]

    @property
    def layers(self) -> int:
        return len(self.mlps)

    @property
    def kinds(self) -> tuple[tuple[str, str], ...]:
        return tuple(zip(self.indexers, self.mlps, strict=True))

    @property
    def stack(self) -> tuple[int, ...]:
        return tuple(range(self.layers))

    def of(self, kind: str) -> tuple[int, ...]:
        """The layers with this indexer or MLP."""
        return tuple(i for i, both in enumerate(self.kinds) if kind in both)


def ignored(config: Config) -> tuple[str, ...]:
    """Copies of the embedding and the head beside the prediction layer, or a layer not asked for."""
    return (f"model.layers.{config.layers}.",)


def read_drafts(r: ConfigReader) -> int:
    return r.require("num_nextn_predict_layers", (0, 1), 0)


def read_config(values: Mapping[str, Any]) -> Config:
    r = ConfigReader(text_section(values))
    r.require("hidden_act", ("silu",), "silu")
    r.require("mlp_bias", (False,), False)
    r.require("rope_interleave", (True,), True)
    layers, heads = r.read("num_hidden_layers", int), r.read("num_attention_heads", int)
    r.require("num_key_value_heads", (heads,), heads)
    kinds = r.read("layer_types", list, None) or []
    if not set(kinds) <= {"indexed_attention", "deepseek_sparse_attention", "full_attention"}:
        raise r.refuse("layer_types", kinds, "indexed_attention only")
    indexers, mlps = read_indexer_types(r, layers), read_mlp_types(r, layers)
    if indexers[0] != FULL:
        raise r.refuse("indexer_types", list(indexers), f"a first layer that is {FULL}")
    nope, turned = r.read("qk_nope_head_dim", int), r.read("qk_rope_head_dim", int)
    index = Index(
        heads=r.read("index_n_heads", int, 32),
        dim=r.read("index_head_dim", int, 128),
        top=r.read("index_topk", int, 2048),
        interleaved=r.read("indexer_rope_interleave", bool, True),
    )
    if turned < 2 or turned % 2 or turned > index.dim:
        raise r.refuse("qk_rope_head_dim", turned, f"an even number up to index_head_dim {index.dim}")
    return Config(
        vocab=r.read("vocab_size", int),
        hidden=r.read("hidden_size", int),
        indexers=indexers,
        mlps=mlps,
        latent=Latent(
            heads=heads,
            q_rank=r.read("q_lora_rank", int),
            kv_rank=r.read("kv_lora_rank", int),
            nope=nope,
            rope=turned,
            value=r.read("v_head_dim", int),
            scale=(nope + turned) ** -0.5 * _attention_factor(r),
            eps=LATENT_EPS,
            bias=r.read("attention_bias", bool, False),
        ),
        index=index,
        width=r.read("intermediate_size", int) if DENSE in mlps else 0,
        experts=read_experts(r) if SPARSE in mlps or read_drafts(r) else NO_EXPERTS,
        eps=r.read("rms_norm_eps", float, 1e-5),
        rope=read_rope(r, turned),
        tied=r.read("tie_word_embeddings", bool, False),
        drafts=read_drafts(r),
        max_positions=r.read("max_position_embeddings", int, 202752),
        eos=r.tokens("eos_token_id"),
    )


def _attention_factor(r: ConfigReader) -> float:
    """What extended ropes multiply the softmax scale by: mscale(factor, mscale_all_dim)^2."""
    section = r.section("rope_parameters") or r.section("rope_scaling")
    if section is None:
        return 1.0
    section.require("partial_rotary_factor", (1.0, 1), 1.0)
    kind = section.read("rope_type", str, None) or section.read("type", str, "default")
    everywhere = section.read("mscale_all_dim", float, 0.0)
    if kind == "default" or not everywhere:
        return 1.0
    return yarn_mscale(section.read("factor", float), everywhere) ** 2


# --- Declarations -------------------------------------------------------------------------------


def _norm(name: str, config: Config, layers: tuple[int, ...]) -> Param:
    dims = (Dim(config.hidden, "embed"),)
    return Param(f"model.layers.{{layer}}.{name}.weight", dims, layers, init="ones")


def _declare_layers(
    config: Config, ranks: int, layers: tuple[int, ...], full: tuple[int, ...],
    dense: tuple[int, ...], sparse: tuple[int, ...],
) -> Tree:  # fmt: skip
    prefix, hidden = "model.layers.{layer}", config.hidden
    tree: Tree = {
        "input_norm": _norm("input_layernorm", config, layers),
        "attention": declare_mla(config.latent, hidden, layers, f"{prefix}.self_attn", ranks),
        "indexer": declare_indexer(
            config.index, hidden, config.latent.q_rank, full, f"{prefix}.self_attn.indexer"
        ),
        "post_norm": _norm("post_attention_layernorm", config, layers),
    }
    if dense:
        tree["mlp"] = declare_mlp(hidden, config.width, dense, f"{prefix}.mlp", ranks)
    if sparse:
        tree["moe"] = declare_moe(config.experts, hidden, sparse, f"{prefix}.mlp", ranks)
    return tree


def declare(config: Config, ranks: int) -> Tree:
    embed = Dim(config.hidden, "embed")
    sets = (config.stack, config.of(FULL), config.of(DENSE), config.of(SPARSE))
    tree: Tree = {
        "embed": declare_vocabulary(config.vocab, config.hidden, "model.embed_tokens.weight", ranks),
        "layers": _declare_layers(config, ranks, *sets),
        "norm": Param("model.norm.weight", (embed,), init="ones"),
    }
    if not config.tied:
        tree["head"] = declare_vocabulary(config.vocab, config.hidden, "lm_head.weight", ranks)
    return tree


def declare_draft(config: Config, ranks: int) -> Tree:
    """The multi-token prediction layer: one more sparse layer and what joins its inputs."""
    if not config.drafts:
        return {}
    layers, embed = (config.layers,), Dim(config.hidden, "embed")
    join = (embed, Dim(2 * config.hidden))
    return {
        "embed_norm": _norm("enorm", config, layers),
        "hidden_norm": _norm("hnorm", config, layers),
        "join": Param("model.layers.{layer}.eh_proj.weight", join, layers),
        "norm": _norm("shared_head.norm", config, layers),
        **_declare_layers(config, ranks, layers, layers, (), layers),
    }


def declare_caches(config: Config, ranks: int) -> dict[str, caches.Declaration]:
    return {
        "latent": declare_latents(config.latent, config.stack, config.index.top),
        "index": caches.Paged(config.of(FULL), (Dim(config.index.dim),)),
    }


def declare_draft_caches(config: Config, ranks: int) -> dict[str, caches.Declaration]:
    if not config.drafts:
        return {}
    layers = (config.layers,)
    return {
        "draft_latent": declare_latents(config.latent, layers),
        "draft_index": caches.Paged(layers, (Dim(config.index.dim),)),
    }


# --- The pass -----------------------------------------------------------------------------------


def _feed(
    y: jax.Array, p: Any, kind: str, at: Any, batch: Batch, config: Config, context: Context
) -> jax.Array:
    """The layer's MLP or experts over normalised y."""
    if kind == DENSE:
        return mlp(y, p["mlp"], at, batch, context)
    return moe(y, p["moe"], at, config.experts, batch, context)


def forward(
    params: Any,
    cache: caches.Caches,
    batch: Batch,
    config: Config,
    context: Context,
    taps: tuple[int, ...] = (),
    capture: Collection[str] = (),
) -> Output:
    p, layers = params["layers"], config.stack
    x = embed_tokens(params["embed"], batch, context)
    rope = angles(config.rope, batch.positions)
    tapped = jnp.zeros((len(taps), *x.shape), x.dtype) if taps else None
    # The choice of the latest full layer, for the shared ones behind it.
    dense = batch.pages.shape[1] * cache["latent"].shape[2] <= config.index.top
    chosen = None if dense else jnp.full((*batch.tokens.shape, config.index.top), -1, jnp.int32)

    def block(carry: Any, layer: Layer) -> Any:
        x, cache, chosen, tapped = carry
        at, (indexer, feed) = layer.within(layers), layer.kind
        with jax.named_scope("attention"):
            y = rms_norm(x, p["input_norm"], at, eps=config.eps)
            latent, row = latents(y, p["attention"], at, config.latent, batch, context)
            if indexer == FULL:
                slot = layer.within(config.of(FULL))
                chosen, cache = select_tokens(
                    y, latent, p["indexer"], slot, cache, "index", slot, batch, config.index, context, rope
                )
            mixed, cache = mla(
                row, latent, p["attention"], at, cache, "latent", at, batch, config.latent, context, rope, chosen
            )
            x = x + mixed
        with jax.named_scope("mlp" if feed == DENSE else "moe"):
            y = rms_norm(x, p["post_norm"], at, eps=config.eps)
            fed = _feed(y, p, feed, layer.within(config.of(feed)), batch, config, context)
            x = x + fed
        seen = {"mixer_out": mixed, "mlp_out": fed, "residual": x}
        return (x, cache, chosen, tap(tapped, taps, layer, x)), pick(seen, capture)

    first = pick({"embed": x}, capture)
    (x, cache, _, tapped), captured = run_layers(config.kinds, block, (x, cache, chosen, tapped))
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
    """One step of the prediction layer (GLM-5's, after DeepSeek-V3's).

    Args:
      batch: `tokens[b, t]` follows the token whose state is `hidden[b, t]`.
      hidden: [B, Q, H] after the final norm, or what the previous depth returned.

    Returns:
      (float32 logits [B, Q, vocab], what the next depth reads, caches).
    """
    del depth
    p, at = params["draft"], 0
    with jax.named_scope("draft"):
        e = rms_norm(embed_tokens(params["embed"], batch, context), p["embed_norm"], at, eps=config.eps)
        h = rms_norm(hidden.astype(e.dtype), p["hidden_norm"], at, eps=config.eps)
        x = linear(jnp.concatenate([e, h], -1), p["join"], at, context=context, rows=batch.rows)
        rope = angles(config.rope, batch.positions)
        y = rms_norm(x, p["input_norm"], at, eps=config.eps)
        latent, row = latents(y, p["attention"], at, config.latent, batch, context)
        chosen, cache = select_tokens(
            y, latent, p["indexer"], at, cache, "draft_index", 0, batch, config.index, context, rope
        )
        mixed, cache = mla(
            row, latent, p["attention"], at, cache, "draft_latent", 0, batch, config.latent, context, rope, chosen
        )
        x = x + mixed
        x = x + _feed(rms_norm(x, p["post_norm"], at, eps=config.eps), p, SPARSE, at, batch, config, context)
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
