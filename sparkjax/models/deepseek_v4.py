"""deepseek_v4: attention over one shared key-value row a token, a sliding window plus compressed
entries of the past, in several residual streams joined by hyper-connections (DeepSeek-V4).

A layer is two sites, each X' = hyper(X, sublayer). Attention is one of three kinds: the window
only; the window and every entry of `heavy` tokens (HCA); the window and the entries of `light`
tokens that an indexer over a smaller compressed cache picks (CSA). Every layer has experts; the
first ones look them up by token id.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..kernels import indexer as indexer_kernel
from ..kernels.linear import linear
from ..mesh.context import Context
from . import cache as caches
from .batch import Batch
from .config import ConfigReader, text_section
from .family import Drafts, Output
from .layers.compress import (
    Compressor,
    compress,
    declare_compressor,
    declare_entries,
    rotate_tail,
    store_entries,
    visible_entries,
)
from .layers.deepseek_moe import declare_moe, moe, read_experts
from .layers.head import declare_vocabulary, embed_tokens, vocabulary_logits
from .layers.hyper import (
    Hyper,
    collapse,
    declare_head,
    declare_site,
    expand,
    head_weights,
    site,
    spread_streams,
)
from .layers.norm import rms_norm
from .layers.rope import Rope, angles, read_rope
from .layers.shared_kv import SharedKV, declare_shared_kv, declare_window, latents, shared_kv
from .layers.shared_moe import Experts
from .layers.stack import Layer, pick, run_layers, tap
from .params import Dim, Param, Tree

WINDOW, LIGHT, HEAVY = "window", "csa", "hca"
KINDS = {
    "sliding_attention": WINDOW,
    "compressed_sparse_attention": LIGHT,
    "heavily_compressed_attention": HEAVY,
}
RATIOS = {0: WINDOW, 4: LIGHT, 128: HEAVY}
"""What `compress_ratios` mean where nothing else tells."""
HASHED, CHOSEN = "hash_moe", "moe"
IGNORED = ("mtp.",)
"""Copies of the embedding and head beside the prediction layer, further prediction layers, and
the drafters that some releases keep under the same names."""


DRAFTS = Drafts(reads="residual")
"""The prediction layer reads all streams."""


@dataclasses.dataclass(frozen=True)
class Config:
    vocab: int
    hidden: int
    mixers: tuple[str, ...]
    mlps: tuple[str, ...]
    attention: SharedKV
    light: Compressor
    heavy: Compressor
    index: Compressor
    index_heads: int
    index_top: int
    hyper: Hyper
    experts: Experts
    eps: float
    plain_rope: Rope
    entry_rope: Rope
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

    def of(self, kind: str) -> tuple[int, ...]:
        """The layers with this attention or these experts."""
        return tuple(i for i, both in enumerate(self.kinds) if kind in both)


def read_config(values: Mapping[str, Any]) -> Config:
    r = ConfigReader(text_section(values))
    r.require("hidden_act", ("silu",), "silu")
    for absent in ("attention_bias", "mlp_bias"):
        r.require(absent, (False,), False)
    r.require("num_key_value_heads", (1,), 1)
    dim, eps = r.read("head_dim", int, 512), r.read("rms_norm_eps", float, 1e-6)
    heads, groups = r.read("num_attention_heads", int), r.read("o_groups", int, 8, least=1)
    if heads % groups:
        raise r.refuse("o_groups", groups, f"divisors of num_attention_heads {heads}")
    window = r.read("sliding_window", int, 128)
    if window < 2:
        raise r.refuse("sliding_window", window, "at least 2")
    light, heavy = _read_ratios(r)
    plain, entries = _read_ropes(r, dim)
    index_dim = r.read("index_head_dim", int, 128)
    if entries.dim > index_dim:
        raise r.refuse("index_head_dim", index_dim, f"at least the {entries.dim} rotary channels")
    # Releases with a drafter of another kind keep it under the prediction layer's names.
    other = any(key.startswith("dspark_") for key in text_section(values))
    return Config(
        vocab=r.read("vocab_size", int),
        hidden=r.read("hidden_size", int),
        mixers=_read_mixers(r, light, heavy),
        mlps=_read_mlps(r),
        attention=SharedKV(
            heads=heads,
            dim=dim,
            q_rank=r.read("q_lora_rank", int),
            window=window,
            groups=groups,
            o_rank=r.read("o_lora_rank", int, 1024),
            eps=eps,
            head_norm=True,
        ),
        light=Compressor(dim, light, eps, overlap=True),
        heavy=Compressor(dim, heavy, eps),
        index=Compressor(index_dim, light, eps, overlap=True),
        index_heads=r.read("index_n_heads", int, 64),
        index_top=r.read("index_topk", int, 512),
        hyper=read_hyper(r, eps),
        experts=read_experts(r),
        eps=eps,
        plain_rope=plain,
        entry_rope=entries,
        tied=r.read("tie_word_embeddings", bool, False),
        drafts=0 if other else min(r.read("num_nextn_predict_layers", int, 0), 1),
        max_positions=r.read("max_position_embeddings", int, 1048576),
        eos=r.tokens("eos_token_id"),
    )


def read_hyper(r: ConfigReader, eps: float) -> Hyper:
    return Hyper(
        streams=r.read("hc_mult", int, 4, least=1),
        rounds=r.read("hc_sinkhorn_iters", int, 20),
        eps=r.read("hc_eps", float, 1e-6),
        norm_eps=eps,
    )


def _read_ratios(r: ConfigReader) -> tuple[int, int]:
    """Tokens a CSA entry and an HCA entry."""
    rates = r.section("compress_rates") or ConfigReader({})
    light = rates.read("compressed_sparse_attention", int, 4)
    heavy = rates.read("heavily_compressed_attention", int, 128)
    light = r.read("compress_rate_csa", int, light)
    heavy = r.read("compress_rate_hca", int, heavy)
    if min(light, heavy) < 2:
        raise r.refuse("compress_rates", (light, heavy), "at least 2 tokens an entry")
    return light, heavy


def _read_mixers(r: ConfigReader, light: int, heavy: int) -> tuple[str, ...]:
    layers = r.read("num_hidden_layers", int)
    kinds = r.read("layer_types", list, None)
    if kinds is not None:
        if len(kinds) < layers or not set(kinds) <= set(KINDS):
            raise r.refuse("layer_types", kinds, f"{layers} entries of {', '.join(KINDS)}")
        return tuple(KINDS[kind] for kind in kinds[:layers])
    ratios = r.read("compress_ratios", list, None)
    if ratios is None:
        return tuple(LIGHT if i >= 2 and i % 2 else HEAVY for i in range(layers))
    meaning = {0: WINDOW, light: LIGHT, heavy: HEAVY} if r.has("compress_rates") else RATIOS
    # More entries than layers: the rest are the drafter's.
    if len(ratios) < layers or not set(ratios[:layers]) <= set(meaning):
        raise r.refuse("compress_ratios", ratios, f"{layers} entries of {sorted(meaning)}")
    return tuple(meaning[ratio] for ratio in ratios[:layers])


def _read_mlps(r: ConfigReader) -> tuple[str, ...]:
    layers = r.read("num_hidden_layers", int)
    kinds = r.read("mlp_layer_types", list, None)
    if kinds is None:
        hashed = min(r.read("num_hash_layers", int, 3), layers)
        kinds = [HASHED] * hashed + [CHOSEN] * (layers - hashed)
    if len(kinds) < layers or not set(kinds) <= {HASHED, CHOSEN}:
        raise r.refuse("mlp_layer_types", kinds, f"{layers} entries of {HASHED} or {CHOSEN}")
    return tuple(kinds[:layers])


def _read_ropes(r: ConfigReader, dim: int) -> tuple[Rope, Rope]:
    """Of layers with a window only, and of those with entries: another base, and yarn that never
    scales cos and sin."""
    partial = r.read("partial_rotary_factor", float, None)
    if partial is None:
        partial = r.read("qk_rope_head_dim", int, dim // 8) / dim
    new = r.section("rope_parameters")
    main = new.section("main") if new is not None else None
    labelled = new.section("compress") if new is not None else None
    if main is not None and labelled is not None:
        rotary = int(dim * main.read("partial_rotary_factor", float, 1.0))
        plain = read_rope(r, rotary, "main")
        rotary = int(dim * labelled.read("partial_rotary_factor", float, 1.0))
        entries = read_rope(r, rotary, "compress")
    else:
        rotary = int(dim * partial)
        inner = 10000.0 if new is None else new.read("rope_theta", float, 10000.0)
        plain = Rope(rotary, r.read("rope_theta", float, inner))
        entries = read_rope(r, rotary)
        theta = r.read("compress_rope_theta", float, 160000.0)
        entries = dataclasses.replace(entries, theta=theta)
        given = new or r.section("rope_scaling") or ConfigReader({})
        scale = given.read("attention_factor", float, 1.0)
        entries = dataclasses.replace(entries, attention_factor=scale)
    if plain.dim != entries.dim or plain.dim % 2 or not plain.dim:
        raise r.refuse("qk_rope_head_dim", (plain.dim, entries.dim), "one even number of channels")
    return plain, entries


# --- Declarations -------------------------------------------------------------------------------


def _norm(name: str, config: Config, layers: tuple[int, ...] | None = None) -> Param:
    return Param(name, (Dim(config.hidden, "embed"),), layers, dtype="float32", init="ones")


def _declare_layers(
    config: Config, ranks: int, layers: tuple[int, ...], prefix: str, hashed: tuple[int, ...]
) -> Tree:
    """What every layer has."""
    hidden = config.hidden
    return {
        "attention_norm": _norm(f"{prefix}.attn_norm.weight", config, layers),
        "attention": declare_shared_kv(config.attention, hidden, layers, f"{prefix}.attn", ranks),
        "attention_site": declare_site(config.hyper, hidden, layers, f"{prefix}.hc_attn"),
        "moe_norm": _norm(f"{prefix}.ffn_norm.weight", config, layers),
        "moe": declare_moe(
            config.experts, hidden, layers, f"{prefix}.ffn", ranks, hashed=hashed, vocab=config.vocab
        ),
        "moe_site": declare_site(config.hyper, hidden, layers, f"{prefix}.hc_ffn"),
    }


def declare(config: Config, ranks: int) -> Tree:
    hidden, prefix = config.hidden, "layers.{layer}"
    layers = _declare_layers(config, ranks, config.stack, prefix, config.of(HASHED))
    if heavy := config.of(HEAVY):
        layers["heavy"] = declare_compressor(config.heavy, hidden, heavy, f"{prefix}.attn.compressor")
    if light := config.of(LIGHT):
        layers["light"] = declare_compressor(config.light, hidden, light, f"{prefix}.attn.compressor")
        name, queries = f"{prefix}.attn.indexer", Dim(config.index_heads * config.index.dim)
        layers["indexer"] = {
            "q_b": Param(f"{name}.wq_b.weight", (queries, Dim(config.attention.q_rank)), light),
            "weights": Param(
                f"{name}.weights_proj.weight", (Dim(config.index_heads), Dim(hidden, "embed")), light
            ),
            "keys": declare_compressor(config.index, hidden, light, f"{name}.compressor"),
        }
    tree: Tree = {
        "embed": declare_vocabulary(config.vocab, hidden, "embed.weight", ranks),
        "layers": layers,
        "collapse": declare_head(config.hyper, hidden, "hc_head"),
        "norm": _norm("norm.weight", config),
    }
    if not config.tied:
        tree["head"] = declare_vocabulary(config.vocab, hidden, "head.weight", ranks)
    return tree


def declare_draft(config: Config, ranks: int) -> Tree:
    """The multi-token prediction layer: a window-only layer over all streams."""
    if not config.drafts:
        return {}
    layers, prefix, embed = (0,), "mtp.{layer}", Dim(config.hidden, "embed")
    return {
        "embed_norm": _norm(f"{prefix}.enorm.weight", config, layers),
        "hidden_norm": _norm(f"{prefix}.hnorm.weight", config, layers),
        "embed_join": Param(f"{prefix}.e_proj.weight", (embed, Dim(config.hidden)), layers),
        "hidden_join": Param(f"{prefix}.h_proj.weight", (embed, Dim(config.hidden)), layers),
        **_declare_layers(config, ranks, layers, prefix, ()),
        "collapse": declare_head(config.hyper, config.hidden, f"{prefix}.hc_head", layers),
        "norm": _norm(f"{prefix}.norm.weight", config, layers),
    }


def declare_caches(config: Config, ranks: int) -> dict[str, caches.Declaration]:
    planes: dict[str, caches.Declaration] = {"window": declare_window(config.attention, config.stack)}
    if heavy := config.of(HEAVY):
        planes |= declare_entries(config.heavy, heavy, "heavy")
    if light := config.of(LIGHT):
        planes |= declare_entries(config.light, light, "light", config.index_top)
        planes |= declare_entries(config.index, light, "index")
    return planes


def declare_draft_caches(config: Config, ranks: int) -> dict[str, caches.Declaration]:
    return {"draft_window": declare_window(config.attention, (0,))} if config.drafts else {}


# --- The pass -----------------------------------------------------------------------------------


def _select(
    y: jax.Array,
    latent: jax.Array,
    p: Any,
    slot: Any,
    cache: caches.Caches,
    batch: Batch,
    config: Config,
    context: Context,
    rope: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array | None, caches.Caches]:
    """The entries that each query's indexer picks, int32 [B, Q, top] (None: all it may see)."""
    c = config.index
    keys, cache = compress(y, p["keys"], slot, cache, "index", slot, batch, c, context)
    cache = store_entries(keys, cache, "index", slot, batch, c.ratio, config.entry_rope, context)
    plane = cache["index"]
    if batch.pages.shape[1] * plane.shape[2] <= config.index_top:
        return None, cache
    q = linear(latent, p["q_b"], slot, context=context, rows=batch.rows)
    q = rotate_tail(q.reshape(*q.shape[:2], config.index_heads, c.dim), *rope)
    weights = linear(y, p["weights"], slot, context=context, rows=batch.rows).astype(jnp.float32)
    chosen = indexer_kernel.select(
        q, weights * config.index_heads**-0.5, plane, slot, batch.pages,
        visible_entries(batch, c.ratio), context=context, k=config.index_top, scale=c.dim**-0.5,
    )  # fmt: skip
    return chosen, cache


def _mix(
    y: jax.Array,
    p: Any,
    layer: Layer,
    cache: caches.Caches,
    batch: Batch,
    config: Config,
    context: Context,
    ropes: tuple[Any, Any],
) -> tuple[jax.Array, caches.Caches]:
    """The layer's attention over normalised y."""
    at, mixer = layer.within(config.stack), layer.kind[0]
    rope = ropes[0] if mixer == WINDOW else ropes[1]
    latent, kv = latents(y, p["attention"], at, config.attention, batch, context)
    more: dict[str, Any] = {}
    if mixer != WINDOW:
        c, name = (config.heavy, "heavy") if mixer == HEAVY else (config.light, "light")
        slot = layer.within(config.of(mixer))
        entries, cache = compress(y, p[name], slot, cache, name, slot, batch, c, context)
        cache = store_entries(entries, cache, name, slot, batch, c.ratio, config.entry_rope, context)
        more = {"entries": cache[name], "entries_at": slot, "limit": visible_entries(batch, c.ratio)}
        if mixer == LIGHT:
            more["selected"], cache = _select(
                y, latent, p["indexer"], slot, cache, batch, config, context, rope
            )
    return shared_kv(
        kv, latent, p["attention"], at, cache, "window", at, batch, config.attention, context, rope, **more
    )


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
    ropes = angles(config.plain_rope, batch.positions), angles(config.entry_rope, batch.positions)
    tapped = jnp.zeros((len(taps), *x.shape), x.dtype) if taps else None

    def block(carry: Any, layer: Layer) -> Any:
        x, cache, tapped = carry
        at, (mixer, feed) = layer.within(layers), layer.kind
        with jax.named_scope(f"{mixer}_attention"):
            hc = site(x, p["attention_site"], at, hyper, context)
            y = rms_norm(collapse(hc.pre, x), p["attention_norm"], at, eps=config.eps, late_cast=True)
            mixed, cache = _mix(y, p, layer, cache, batch, config, context, ropes)
            x = expand(hc, mixed, x)
        with jax.named_scope("moe"):
            hc = site(x, p["moe_site"], at, hyper, context)
            y = rms_norm(collapse(hc.pre, x), p["moe_norm"], at, eps=config.eps, late_cast=True)
            where = {"table_at" if feed == HASHED else "bias_at": layer.within(config.of(feed))}
            fed = moe(y, p["moe"], at, config.experts, batch, context, **where)
            x = expand(hc, fed, x)
        seen = {"mixer_out": mixed, "mlp_out": fed, "residual": x}
        return (x, cache, tap(tapped, taps, layer, x)), pick(seen, capture)

    first = pick({"embed": embedded}, capture)
    (x, cache, tapped), captured = run_layers(config.kinds, block, (x, cache, tapped))
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
    """One step of the prediction layer (after DeepSeek-V3's).

    Args:
      batch: `tokens[b, t]` follows the token whose streams are `hidden[b, t]`.
      hidden: [B, Q, N, H], the raw residual after the last layer, or what the previous depth
        returned.

    Returns:
      (float32 logits [B, Q, vocab], what the next depth reads, caches).
    """
    del depth
    p, at, hyper = params["draft"], 0, config.hyper
    rope = angles(config.plain_rope, batch.positions)

    def norm(x: jax.Array, name: str) -> jax.Array:
        return rms_norm(x, p[name], at, eps=config.eps, late_cast=True)

    with jax.named_scope("draft"):
        e = norm(embed_tokens(params["embed"], batch, context), "embed_norm")
        e = linear(e, p["embed_join"], at, context=context, rows=batch.rows)
        h = norm(hidden.astype(e.dtype), "hidden_norm")
        x = e[..., None, :] + linear(h, p["hidden_join"], at, context=context)
        hc = site(x, p["attention_site"], at, hyper, context)
        y = norm(collapse(hc.pre, x), "attention_norm")
        latent, kv = latents(y, p["attention"], at, config.attention, batch, context)
        mixed, cache = shared_kv(
            kv, latent, p["attention"], at, cache, "draft_window", 0, batch, config.attention, context, rope
        )
        x = expand(hc, mixed, x)
        hc = site(x, p["moe_site"], at, hyper, context)
        y = norm(collapse(hc.pre, x), "moe_norm")
        x = expand(hc, moe(y, p["moe"], at, config.experts, batch, context, bias_at=at), x)
        out = norm(collapse(head_weights(x, p["collapse"], hyper, at), x), "norm")
        head = params.get("head", params["embed"])
        return vocabulary_logits(out, head, config.vocab, context), x, cache


def final(params: Any, residual: jax.Array, config: Config, context: Context) -> jax.Array:
    x = collapse(head_weights(residual, params["collapse"], config.hyper), residual)
    return rms_norm(x, params["norm"], eps=config.eps, late_cast=True)


def logits(
    params: Any,
    residual: jax.Array,
    config: Config,
    context: Context,
    rows: jax.Array | None = None,
) -> jax.Array:
    x = final(params, residual, config, context)
    return vocabulary_logits(x, params.get("head", params["embed"]), config.vocab, context, rows)
