"""mimo_v2_flash: sliding attention with sinks and twice the key heads between full attention, and
auxiliary-loss-free experts without a shared one (MiMo-V2-Flash; Xiaomi 2025).

A layer is x += attention(norm(x)); x += mlp_or_moe(norm(x)). Rope turns the first third of a head's
channels, with its own base on sliding layers; values are scaled before they are cached. Further
layers predict the tokens after next (`draft`): sliding attention and a dense MLP each.
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
from ..weights.quant_config import FUSED_SHARDS
from . import cache as caches
from .batch import Batch
from .config import ConfigReader, text_section
from .family import Drafts, Output
from .layers.attention import Heads, attention, declare_attention, declare_kv, declare_sinks
from .layers.head import declare_vocabulary, embed_tokens, vocabulary_logits
from .layers.mlp import declare_mlp, mlp
from .layers.norm import rms_norm
from .layers.rope import Rope, angles, read_rope
from .layers.shared_moe import DENSE, SPARSE, Experts, declare_moe, moe, read_experts
from .layers.stack import Layer, lone, pick, run_layers, tap
from .params import Dim, Param, Part, Tree

SLIDING, FULL = "sliding_attention", "full_attention"
DRAFTS = Drafts(reads="residual", chained=False)
"""Every prediction layer reads the main model's state in front of the final norm."""
IGNORED = ("model.mtp.",)
"""Prediction layers that the config does not ask for."""
ROTARY_FACTOR = 0.334
"""Share of a head's channels that turn where the config does not tell."""
PLANES = {FULL: ("k", "v"), SLIDING: ("ring_k", "ring_v")}


@dataclasses.dataclass(frozen=True)
class Attention:
    """One kind of attention layer."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    rope: Rope
    sinks: bool
    window: int = 0


@dataclasses.dataclass(frozen=True)
class Config:
    vocab: int
    hidden: int
    mixers: tuple[str, ...]
    mlps: tuple[str, ...]
    full: Attention
    sliding: Attention
    value_scale: float
    attention_bias: bool
    shards: int
    width: int
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
    def stack(self) -> tuple[int, ...]:
        return tuple(range(self.layers))

    @property
    def draft_stack(self) -> tuple[int, ...]:
        return tuple(range(self.drafts))

    @property
    def kinds(self) -> tuple[tuple[str, str], ...]:
        return tuple(zip(self.mixers, self.mlps, strict=True))

    def of(self, kind: str) -> tuple[int, ...]:
        """The layers with this attention or MLP."""
        return tuple(i for i, both in enumerate(self.kinds) if kind in both)

    def shape(self, kind: str) -> Attention:
        return self.sliding if kind == SLIDING else self.full

    def attention(self, kind: str, ranks: int) -> Heads:
        a = self.shape(kind)
        return Heads(
            grouped_heads(a.heads, a.kv_heads, ranks),
            a.head_dim,
            a.value_dim,
            a.head_dim**-0.5,
            window=a.window,
            value_scale=self.value_scale,
        )


def read_config(values: Mapping[str, Any]) -> Config:
    r = ConfigReader(text_section(values))
    r.require("hidden_act", ("silu",), "silu")
    r.require("n_shared_experts", (0,), 0)
    layout = r.require("attention_projection_layout", ("fused_qkv", "split"), "split")
    layers = r.read("num_hidden_layers", int)
    mixers = _read_kinds(
        r, "layer_types", "hybrid_layer_pattern", layers, (FULL, SLIDING),
        [FULL if i == 0 or not (i + 1) % 6 else SLIDING for i in range(layers)],
    )  # fmt: skip
    mlps = _read_kinds(
        r, "mlp_layer_types", "moe_layer_freq", layers, (DENSE, SPARSE),
        [DENSE] + [SPARSE] * (layers - 1),
    )  # fmt: skip
    shared = {**text_section(values), "n_shared_experts": 0, "moe_layer_freq": 1}
    scale = r.read("attention_value_scale", float, None)
    if scale is None:
        scale = 1.0 if r.mentions("attention_value_scale") else 0.707
    config = Config(
        vocab=r.read("vocab_size", int),
        hidden=r.read("hidden_size", int),
        mixers=mixers,
        mlps=mlps,
        full=_read_attention(r, FULL),
        sliding=_read_attention(r, SLIDING),
        value_scale=scale,
        attention_bias=r.read("attention_bias", bool, False),
        shards=r.read("checkpoint_shards", int, FUSED_SHARDS),
        width=r.read("intermediate_size", int),
        experts=read_experts(ConfigReader(shared)),
        eps=r.read("rms_norm_eps", float, 1e-5, also=("layernorm_epsilon",)),
        tied=r.read("tie_word_embeddings", bool, False),
        drafts=r.read("num_nextn_predict_layers", int, 0),
        max_positions=r.read("max_position_embeddings", int, 131072),
        eos=r.tokens("eos_token_id"),
    )
    if layout == "fused_qkv" and not all(_divides(config, kind) for kind in (FULL, SLIDING)):
        raise r.refuse("checkpoint_shards", config.shards, "shards that hold whole key heads")
    return config


def _read_kinds(
    r: ConfigReader, names: str, flags: str, layers: int, kinds: tuple[str, str], default: list[str]
) -> tuple[str, ...]:
    """The kind of every layer: by name, or as flags (1 is the second kind)."""
    found = r.read(names, list, None)
    if found is None:
        raw = r.read(flags, list, None)
        found = default if raw is None else [kinds[f] if f in (0, 1) else f for f in raw]
        names = names if raw is None else flags
    if len(found) != layers or not set(found) <= set(kinds):
        raise r.refuse(names, found, f"{layers} entries of {kinds[0]} (0) or {kinds[1]} (1)")
    return tuple(found)


def _read_attention(r: ConfigReader, kind: str) -> Attention:
    """One kind's fields; those of sliding layers are spelled `swa_*` where they differ."""
    heads, kv_heads = r.read("num_attention_heads", int), r.read("num_key_value_heads", int)
    head_dim, value_dim = r.read("head_dim", int, 192), r.read("v_head_dim", int, 128)
    sinks = r.read("add_full_attention_sink_bias", bool, False)
    if kind == FULL:
        return Attention(heads, kv_heads, head_dim, value_dim, _read_rope(r, head_dim, kind), sinks)
    earlier = r.read("sliding_window_size", int, None)
    head_dim = r.read("swa_head_dim", int, head_dim)
    return Attention(
        heads=r.read("swa_num_attention_heads", int, heads),
        kv_heads=r.read("swa_num_key_value_heads", int, 2 * kv_heads),
        head_dim=head_dim,
        value_dim=r.read("swa_v_head_dim", int, value_dim),
        rope=_read_rope(r, head_dim, kind),
        sinks=r.read("add_swa_attention_sink_bias", bool, True),
        # `sliding_window_size` counts earlier tokens only, `sliding_window` the query too.
        window=r.read("sliding_window", int, 129) if earlier is None else earlier + 1,
    )


def _read_rope(r: ConfigReader, head_dim: int, kind: str) -> Rope:
    everywhere = r.read("partial_rotary_factor", float, None)
    new = r.section("rope_parameters")
    if new is not None:
        own = new.section(kind) or new
        plain = own.read("rope_type", str, "default", also=("type",)) == "default"
        # Extended ropes turn whole heads unless told otherwise, as in the published implementation.
        usual = everywhere or (ROTARY_FACTOR if plain else 1.0)
        return read_rope(r, int(head_dim * own.read("partial_rotary_factor", float, usual)), kind)
    old = r.section("rope_scaling")
    if old is not None:
        # Which layers an extended rope would apply to is told by `rope_parameters` alone.
        for name in ("rope_type", "type"):
            old.require(name, ("default",), "default")
    theta = r.read("rope_theta", float, 5e6) if kind == FULL else r.read("swa_rope_theta", float, 1e4)
    return Rope(int(head_dim * (everywhere or ROTARY_FACTOR)), theta)


# --- Declarations -------------------------------------------------------------------------------


def _rows(config: Config, kind: str) -> tuple[int, int, int]:
    """Rows of the query, key and value projections."""
    a = config.shape(kind)
    return a.heads * a.head_dim, a.kv_heads * a.head_dim, a.kv_heads * a.value_dim


def _divides(config: Config, kind: str) -> bool:
    return config.shards > 0 and not config.shape(kind).kv_heads % config.shards


def _declare_attention(
    config: Config, kind: str, layers: tuple[int, ...], prefix: str, ranks: int
) -> dict[str, Param]:
    """Projections (also where they are one tensor: for each of the checkpoint's shards its query
    rows, its key rows and its value rows) and sinks."""
    heads = config.attention(kind, ranks)
    params = declare_attention(heads, config.hidden, layers, prefix, bias=config.attention_bias)
    if _divides(config, kind):
        shares = [rows // config.shards for rows in _rows(config, kind)]
        for at, name in enumerate("qkv"):
            starts = [shard * sum(shares) + sum(shares[:at]) for shard in range(config.shards)]
            ranges = tuple((start, start + shares[at]) for start in starts)
            for key, tensor in ((name, "weight"), (f"{name}_bias", "bias")):
                if key in params:
                    part = Part(f"{prefix}.qkv_proj.{tensor}", ranges)
                    params[key] = dataclasses.replace(params[key], also=(part,))
    if config.shape(kind).sinks:
        names = (f"{prefix}.attention_sink_bias", f"{prefix}.sinks")
        params["sinks"] = declare_sinks(heads, layers, *names)
    return params


def declare(config: Config, ranks: int) -> Tree:
    hidden, prefix = config.hidden, "model.layers.{layer}"
    embed = Dim(hidden, "embed")

    def norm(name: str) -> Param:
        return Param(f"{prefix}.{name}.weight", (embed,), config.stack, init="ones")

    layers: Tree = {
        "input_norm": norm("input_layernorm"),
        "post_norm": norm("post_attention_layernorm"),
    }
    for kind in (FULL, SLIDING):
        if own := config.of(kind):
            layers[kind] = _declare_attention(config, kind, own, f"{prefix}.self_attn", ranks)
    if dense := config.of(DENSE):
        layers["mlp"] = declare_mlp(hidden, config.width, dense, f"{prefix}.mlp", ranks)
    if sparse := config.of(SPARSE):
        layers["moe"] = declare_moe(config.experts, hidden, sparse, f"{prefix}.mlp", ranks)
    tree: Tree = {
        "embed": declare_vocabulary(config.vocab, hidden, "model.embed_tokens.weight", ranks),
        "layers": layers,
        "norm": Param("model.norm.weight", (embed,), init="ones"),
    }
    if not config.tied:
        tree["head"] = declare_vocabulary(config.vocab, hidden, "lm_head.weight", ranks)
    return tree


def declare_draft(config: Config, ranks: int) -> Tree:
    """The prediction layers: a dense sliding layer each, and what joins its inputs."""
    if not config.drafts:
        return {}
    layers, embed, prefix = config.draft_stack, Dim(config.hidden, "embed"), "model.mtp.layers.{layer}"

    def norm(name: str, *also: str) -> Param:
        other = tuple(f"{prefix}.{name}.weight" for name in also)
        return Param(f"{prefix}.{name}.weight", (embed,), layers, init="ones", also=other)

    return {
        "embed_norm": norm("enorm"),
        "hidden_norm": norm("hnorm"),
        "join": Param(f"{prefix}.eh_proj.weight", (embed, Dim(2 * config.hidden)), layers),
        "input_norm": norm("input_layernorm"),
        "attention": _declare_attention(config, SLIDING, layers, f"{prefix}.self_attn", ranks),
        "post_norm": norm("pre_mlp_layernorm", "post_attention_layernorm"),
        "mlp": declare_mlp(config.hidden, config.width, layers, f"{prefix}.mlp", ranks),
        "norm": norm("final_layernorm"),
    }


def declare_caches(config: Config, ranks: int) -> dict[str, caches.Declaration]:
    planes: dict[str, caches.Declaration] = {}
    for kind, names in PLANES.items():
        if layers := config.of(kind):
            declared = declare_kv(config.attention(kind, ranks), layers)
            planes |= dict(zip(names, declared.values(), strict=True))
    return planes


def declare_draft_caches(config: Config, ranks: int) -> dict[str, caches.Declaration]:
    if not config.drafts:
        return {}
    planes = declare_kv(config.attention(SLIDING, ranks), config.draft_stack)
    return {f"draft_{name}": plane for name, plane in planes.items()}


# --- The pass -----------------------------------------------------------------------------------


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
    ropes = {kind: angles(config.shape(kind).rope, batch.positions) for kind in (FULL, SLIDING)}
    tapped = jnp.zeros((len(taps), *x.shape), x.dtype) if taps else None

    def block(carry: Any, layer: Layer) -> Any:
        x, cache, tapped = carry
        at, (mixer, feed) = layer.within(layers), layer.kind
        own, weights = config.of(mixer), p[mixer]
        with jax.named_scope("sliding_attention" if mixer == SLIDING else "attention"):
            y = rms_norm(x, p["input_norm"], at, eps=config.eps)
            heads = config.attention(mixer, context.ranks)
            sinks = weights["sinks"][layer.within(own)] if "sinks" in weights else None
            mixed, cache = attention(
                y, weights, cache, PLANES[mixer], batch, layer, heads, own, context,
                ropes[mixer], own, sinks,
            )  # fmt: skip
            x = x + mixed
        with jax.named_scope("mlp" if feed == DENSE else "moe"):
            y = rms_norm(x, p["post_norm"], at, eps=config.eps)
            at = layer.within(config.of(feed))
            if feed == DENSE:
                fed = mlp(y, p["mlp"], at, batch, context)
            else:
                fed = moe(y, p["moe"], at, config.experts, batch, context)
            x = x + fed
        seen = {"mixer_out": mixed, "mlp_out": fed, "residual": x}
        return (x, cache, tap(tapped, taps, layer, x)), pick(seen, capture)

    first = pick({"embed": x}, capture)
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
    """x = eh_proj [enorm(embed(token)) | hnorm(hidden)], one layer, norm, the main head.

    Args:
      batch: `tokens[b, t]` is the token `depth + 1` behind the one whose state is `hidden[b, t]`.
      hidden: [B, Q, H] in front of the final norm, the main model's at every depth.
      depth: which prediction layer; layer K knows K + 1 tokens more than the main model.

    Returns:
      (float32 logits [B, Q, vocab], `hidden` again, caches).
    """
    if not 0 <= depth < config.drafts:
        raise ValueError(f"depth is {depth}: this model has {config.drafts} prediction layers")
    p, at, layers = params["draft"], depth, config.draft_stack
    with jax.named_scope("draft"):
        e = rms_norm(embed_tokens(params["embed"], batch, context), p["embed_norm"], at, eps=config.eps)
        h = rms_norm(hidden.astype(e.dtype), p["hidden_norm"], at, eps=config.eps)
        x = linear(jnp.concatenate([e, h], -1), p["join"], at, context=context, rows=batch.rows)
        y = rms_norm(x, p["input_norm"], at, eps=config.eps)
        weights, rope = p["attention"], angles(config.sliding.rope, batch.positions)
        sinks = weights["sinks"][at] if "sinks" in weights else None
        mixed, cache = attention(
            y, weights, cache, ("draft_k", "draft_v"), batch, lone(SLIDING, at),
            config.attention(SLIDING, context.ranks), layers, context, rope, layers, sinks,
        )  # fmt: skip
        x = x + mixed
        y = rms_norm(x, p["post_norm"], at, eps=config.eps)
        x = rms_norm(x + mlp(y, p["mlp"], at, batch, context), p["norm"], at, eps=config.eps)
        out = vocabulary_logits(x, params.get("head", params["embed"]), config.vocab, context)
    return out, hidden, cache


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
