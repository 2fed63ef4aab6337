"""glm5_next: Kimi delta attention beside sparse latent attention, in several residual streams
joined by hyper-connections, with clamped experts (GLM-5.3-Flash). No positions anywhere.

A layer is two sites, each X' = hyper(X, sublayer): the mixer (KDA, or latent attention over
pools of tokens that an indexer picks) and the MLP or experts. A "shared" attention layer uses
what the layer right before it picked. The vision tower is not read.
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
from .layers.hyper import Hyper, collapse, declare_site, expand, site, spread_streams
from .layers.indexer import (
    FULL,
    SHARED,
    Index,
    declare_pooled_indexer,
    declare_pooled_keys,
    read_indexer_types,
    select_pools,
)
from .layers.kda import Kimi, declare_kda, declare_kda_caches, kda
from .layers.mla import Latent, declare_latents, declare_mla, latents, mla
from .layers.mlp import declare_mlp, mlp
from .layers.norm import rms_norm
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
from .params import Dim, Param, Part, Tree, map_params

LINEAR = "linear"
KINDS = {
    "linear_attention": LINEAR,
    "mamba": LINEAR,
    "indexed_attention": FULL,
    "deepseek_sparse_attention": FULL,
    "full_attention": FULL,
    "attention": FULL,
}
"""Spellings of `layer_types`."""
PREFIX = "model.language_model"
IGNORED = ("model.visual.",)


@dataclasses.dataclass(frozen=True)
class Config:
    vocab: int
    hidden: int
    mixers: tuple[str, ...]
    mlps: tuple[str, ...]
    kimi: Kimi
    latent: Latent
    index: Index
    hyper: Hyper
    width: int
    limit: float
    experts: Experts
    eps: float
    tied: bool
    drafts: int
    max_positions: int
    eos: tuple[int, ...]

    @property
    def layers(self) -> int:
        return len(self.mixers)

    @property
    def kinds(self) -> tuple[tuple[str, str], ...]:
        return tuple(zip(self.mixers, self.mlps, strict=True))

    @property
    def stack(self) -> tuple[int, ...]:
        return tuple(range(self.layers))

    def of(self, *kinds: str) -> tuple[int, ...]:
        """The layers with one of these mixers or MLPs."""
        return tuple(i for i, both in enumerate(self.kinds) if set(kinds) & set(both))

    @property
    def attention_stack(self) -> tuple[int, ...]:
        return self.of(FULL, SHARED)


def read_config(values: Mapping[str, Any]) -> Config:
    r = ConfigReader(text_section(values))
    r.require("hidden_act", ("silu",), "silu")
    r.require("qk_rope_head_dim", (0,), 0)
    r.require("index_kpool_always_select_tail", (True,), True)
    layers, heads = r.read("num_hidden_layers", int), r.read("num_attention_heads", int)
    r.require("num_key_value_heads", (heads,), heads)
    eps, nope = r.read("rms_norm_eps", float, 1e-5), r.read("qk_nope_head_dim", int)
    limit = r.read("swiglu_limit", float, 10.0)
    mlps = read_mlp_types(r, layers)
    drafts = r.require("num_nextn_predict_layers", (0, 1), 0)
    pool, top = r.read("index_kpool", int, 16, least=1), r.read("index_topk", int, 2048)
    if pool < 1:
        raise r.refuse("index_kpool", pool, "a positive number")
    if top < 1 or top % pool:
        raise r.refuse("index_topk", top, f"multiples of index_kpool {pool}")
    outer = ConfigReader(values).read("tie_word_embeddings", bool, None)
    return Config(
        vocab=r.read("vocab_size", int),
        hidden=r.read("hidden_size", int),
        mixers=_read_mixers(r, layers),
        mlps=mlps,
        kimi=_read_kimi(r, eps),
        latent=Latent(
            heads=heads,
            q_rank=r.read("q_lora_rank", int),
            kv_rank=r.read("kv_lora_rank", int),
            nope=nope,
            rope=0,
            value=r.read("v_head_dim", int),
            scale=nope**-0.5,
            eps=eps,
            bias=r.read("attention_bias", bool, False),
        ),
        index=Index(
            heads=r.read("index_n_heads", int, 32),
            dim=r.read("index_head_dim", int, 128),
            top=top,
            pool=pool,
        ),
        hyper=Hyper(
            streams=r.read("hc_mult", int, 4, least=1),
            rounds=r.read("hc_sinkhorn_iters", int, 20),
            eps=r.read("hc_eps", float, 1e-6),
            norm_eps=eps,
        ),
        width=r.read("intermediate_size", int) if DENSE in mlps else 0,
        limit=limit,
        experts=read_experts(r, limit) if SPARSE in mlps or drafts else NO_EXPERTS,
        eps=eps,
        tied=r.read("tie_word_embeddings", bool, False) if outer is None else outer,
        drafts=drafts,
        max_positions=r.read("max_position_embeddings", int, 1048576),
        eos=r.tokens("eos_token_id"),
    )


def ignored(config: Config) -> tuple[str, ...]:
    """Copies of the embedding and the head beside the prediction layer, or a layer not asked for."""
    return (f"{PREFIX}.layers.{config.layers}.", f"model.layers.{config.layers}.")


def _read_mixers(r: ConfigReader, layers: int) -> tuple[str, ...]:
    """Per layer LINEAR, or FULL or SHARED attention."""
    kinds = r.read("layer_types", list, None)
    if kinds is None:
        kinds = ["indexed_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)]
    if len(kinds) != layers or not set(kinds) <= set(KINDS):
        raise r.refuse("layer_types", kinds, f"{layers} entries of {', '.join(KINDS)}")
    indexers = read_indexer_types(r, layers)
    mixers = [
        LINEAR if KINDS[kind] == LINEAR else indexer
        for kind, indexer in zip(kinds, indexers, strict=True)
    ]
    for layer, mixer in enumerate(mixers):
        # The published model hands a choice to the next layer only.
        if mixer == SHARED and (layer == 0 or mixers[layer - 1] != FULL):
            raise r.refuse(
                "indexer_types", list(indexers), f"{SHARED} only right behind a {FULL} attention layer"
            )
    return tuple(mixers)


def _read_kimi(r: ConfigReader, eps: float) -> Kimi:
    """The `linear_*` fields, which an older `linear_attn_config` overrides."""
    heads, dim = r.read("linear_num_heads", int, 64), r.read("linear_head_dim", int, 128)
    width, low = r.read("linear_conv_kernel_dim", int, 4), _bound(r, "linear_lower_bound")
    if (old := r.section("linear_attn_config")) is not None:
        heads, dim = old.read("num_heads", int, heads), old.read("head_dim", int, dim)
        width = old.read("short_conv_kernel_size", int, width)
        low = _bound(old, "gate_lower_bound", low)
        if low is None and old.read("safe_gate", bool, True):
            low = -5.0
    return Kimi(heads=heads, dim=dim, width=width, low=low, eps=eps)


def _bound(r: ConfigReader, key: str, default: float | None = -5.0) -> float | None:
    """A bound that may be null, which is not the same as absent."""
    return r.read(key, float, None) if r.mentions(key) else default


# --- Declarations -------------------------------------------------------------------------------


def _spellings(tree: Tree) -> Tree:
    """Text-only checkpoints leave `language_model` out of the names."""

    def short(name: str) -> str:
        return name.replace(f"{PREFIX}.", "model.")

    def one(param: Param) -> Param:
        more = [
            dataclasses.replace(other, name=short(other.name))
            if isinstance(other, Part)
            else short(other)
            for other in param.also
        ]
        return dataclasses.replace(param, also=(*param.also, short(param.name), *more))

    return map_params(one, tree)


def _norm(name: str, config: Config, layers: tuple[int, ...]) -> Param:
    dims = (Dim(config.hidden, "embed"),)
    return Param(f"{PREFIX}.layers.{{layer}}.{name}.weight", dims, layers, init="ones")


def _declare_attention(
    config: Config, ranks: int, layers: tuple[int, ...], full: tuple[int, ...]
) -> Tree:
    prefix, hidden = f"{PREFIX}.layers.{{layer}}.self_attn", config.hidden
    return {
        "attention": declare_mla(config.latent, hidden, layers, prefix, ranks),
        "indexer": declare_pooled_indexer(
            config.index, hidden, config.latent.q_rank, full, f"{prefix}.indexer"
        ),
    }


def declare(config: Config, ranks: int) -> Tree:
    hidden, prefix = config.hidden, f"{PREFIX}.layers.{{layer}}"
    linear_layers, dense, sparse = config.of(LINEAR), config.of(DENSE), config.of(SPARSE)
    layers: Tree = {
        "input_norm": _norm("input_layernorm", config, config.stack),
        "post_norm": _norm("post_attention_layernorm", config, config.stack),
    }
    for name in ("attn", "ffn"):
        layers[f"{name}_site"] = declare_site(
            config.hyper, hidden, config.stack, f"{prefix}.hc_{name}", dtype="weight"
        )
    if linear_layers:
        layers["kda"] = declare_kda(config.kimi, hidden, linear_layers, f"{prefix}.self_attn", ranks)
    if config.attention_stack:
        layers |= _declare_attention(config, ranks, config.attention_stack, config.of(FULL))
    if dense:
        layers["mlp"] = declare_mlp(hidden, config.width, dense, f"{prefix}.mlp", ranks)
    if sparse:
        layers["moe"] = declare_moe(config.experts, hidden, sparse, f"{prefix}.mlp", ranks)
    tree: Tree = {
        "embed": declare_vocabulary(config.vocab, hidden, f"{PREFIX}.embed_tokens.weight", ranks),
        "layers": layers,
        "norm": Param(f"{PREFIX}.norm.weight", (Dim(hidden, "embed"),), init="ones"),
    }
    if not config.tied:
        tree["head"] = declare_vocabulary(config.vocab, hidden, "lm_head.weight", ranks)
    return _spellings(tree)


def declare_draft(config: Config, ranks: int) -> Tree:
    """The multi-token prediction layer: sparse attention and experts on one plain residual."""
    if not config.drafts:
        return {}
    layers, hidden = (config.layers,), config.hidden
    prefix, join = f"{PREFIX}.layers.{{layer}}", (Dim(hidden, "embed"), Dim(2 * hidden))
    return _spellings(
        {
            "embed_norm": _norm("enorm", config, layers),
            "hidden_norm": _norm("hnorm", config, layers),
            "join": Param(f"{prefix}.eh_proj.weight", join, layers),
            "input_norm": _norm("input_layernorm", config, layers),
            **_declare_attention(config, ranks, layers, layers),
            "post_norm": _norm("post_attention_layernorm", config, layers),
            "moe": declare_moe(config.experts, hidden, layers, f"{prefix}.mlp", ranks),
            "norm": _norm("shared_head.norm", config, layers),
        }
    )


def declare_caches(config: Config, ranks: int) -> dict[str, caches.Declaration]:
    planes: dict[str, caches.Declaration] = {}
    if layers := config.of(LINEAR):
        planes |= declare_kda_caches(config.kimi, layers, ranks)
    if layers := config.attention_stack:
        planes["latent"] = declare_latents(config.latent, layers, config.index.top)
        planes |= declare_pooled_keys(config.index, config.of(FULL))
    return planes


def declare_draft_caches(config: Config, ranks: int) -> dict[str, caches.Declaration]:
    if not config.drafts:
        return {}
    layers = (config.layers,)
    keys = declare_pooled_keys(config.index, layers, "draft_")
    return {"draft_latent": declare_latents(config.latent, layers), **keys}


# --- The pass -----------------------------------------------------------------------------------


def _feed(
    y: jax.Array, p: Any, kind: str, at: Any, batch: Batch, config: Config, context: Context
) -> jax.Array:
    """The layer's MLP or experts over normalised y."""
    if kind == DENSE:
        return mlp(y, p["mlp"], at, batch, context, limit=config.limit)
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
    p, layers, hyper = params["layers"], config.stack, config.hyper
    embedded = embed_tokens(params["embed"], batch, context)
    x = spread_streams(embedded, hyper)
    tapped = jnp.zeros((len(taps), *x.shape), x.dtype) if taps else None

    def mix(y: jax.Array, cache: caches.Caches, chosen: Any, layer: Layer) -> Any:
        mixer = layer.kind[0]
        if mixer == LINEAR:
            at = layer.within(config.of(LINEAR))
            return *kda(y, p["kda"], at, cache, at, batch, config.kimi, context), chosen
        at = layer.within(config.attention_stack)
        latent, row = latents(y, p["attention"], at, config.latent, batch, context)
        picked = chosen
        if mixer == FULL:
            slot = layer.within(config.of(FULL))
            picked, cache = select_pools(
                y, latent, p["indexer"], slot, cache, slot, batch, config.index, context
            )
        mixed, cache = mla(
            row, latent, p["attention"], at, cache, "latent", at, batch, config.latent, context, None, picked
        )
        return mixed, cache, None if chosen is None else picked

    def block(carry: Any, layer: Layer) -> Any:
        x, cache, chosen, tapped = carry
        at, (mixer, feed) = layer.within(layers), layer.kind
        with jax.named_scope("kda" if mixer == LINEAR else "attention"):
            hc = site(x, p["attn_site"], at, hyper, context)
            y = rms_norm(collapse(hc.pre, x), p["input_norm"], at, eps=config.eps)
            mixed, cache, chosen = mix(y, cache, chosen, layer)
            x = expand(hc, mixed, x)
        with jax.named_scope("mlp" if feed == DENSE else "moe"):
            hc = site(x, p["ffn_site"], at, hyper, context)
            y = rms_norm(collapse(hc.pre, x), p["post_norm"], at, eps=config.eps)
            fed = _feed(y, p, feed, layer.within(config.of(feed)), batch, config, context)
            x = expand(hc, fed, x)
        seen = {"mixer_out": mixed, "mlp_out": fed, "residual": x}
        return (x, cache, chosen, tap(tapped, taps, layer, x)), pick(seen, capture)

    first = pick({"embed": embedded}, capture)
    carry = (x, cache, _nothing_chosen(cache, batch, config), tapped)
    (x, cache, _, tapped), captured = run_layers(config.kinds, block, carry)
    return Output(x, tapped, cache, first | captured)


def _nothing_chosen(cache: caches.Caches, batch: Batch, config: Config) -> jax.Array | None:
    """What a shared layer would read before any layer has chosen; None where none ever reads."""
    width = config.index.top + config.index.pool - 1
    if SHARED not in config.mixers or batch.pages.shape[1] * cache["latent"].shape[2] <= width:
        return None
    return jnp.full((*batch.tokens.shape, width), -1, jnp.int32)


def draft(
    params: Any,
    cache: caches.Caches,
    batch: Batch,
    hidden: jax.Array,
    config: Config,
    context: Context,
    depth: int = 0,
) -> tuple[jax.Array, jax.Array, caches.Caches]:
    """One step of the prediction layer, as `glm_moe_dsa.draft`: `hidden` [B, Q, H] after the final
    norm, or what the previous depth returned."""
    del depth
    p, at = params["draft"], 0
    with jax.named_scope("draft"):
        e = rms_norm(embed_tokens(params["embed"], batch, context), p["embed_norm"], at, eps=config.eps)
        h = rms_norm(hidden.astype(e.dtype), p["hidden_norm"], at, eps=config.eps)
        x = linear(jnp.concatenate([e, h], -1), p["join"], at, context=context, rows=batch.rows)
        y = rms_norm(x, p["input_norm"], at, eps=config.eps)
        latent, row = latents(y, p["attention"], at, config.latent, batch, context)
        chosen, cache = select_pools(
            y, latent, p["indexer"], at, cache, 0, batch, config.index, context, "draft_"
        )
        mixed, cache = mla(
            row, latent, p["attention"], at, cache, "draft_latent", 0, batch, config.latent, context, None, chosen
        )
        x = x + mixed
        x = x + _feed(rms_norm(x, p["post_norm"], at, eps=config.eps), p, SPARSE, at, batch, config, context)
        carry = rms_norm(x, p["norm"], at, eps=config.eps)
        out = vocabulary_logits(carry, params.get("head", params["embed"]), config.vocab, context)
    return out, carry, cache


def final(params: Any, residual: jax.Array, config: Config, context: Context) -> jax.Array:
    mean = jnp.mean(residual.astype(jnp.float32), axis=-2).astype(residual.dtype)
    return rms_norm(mean, params["norm"], eps=config.eps)


def logits(
    params: Any,
    residual: jax.Array,
    config: Config,
    context: Context,
    rows: jax.Array | None = None,
) -> jax.Array:
    x = final(params, residual, config, context)
    return vocabulary_logits(x, params.get("head", params["embed"]), config.vocab, context, rows)
