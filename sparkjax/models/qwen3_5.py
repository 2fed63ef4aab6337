"""qwen3_5: three gated delta nets to one gated attention layer (Qwen3.5-27B, Qwen3.8-27B).

Pre-norm residual layers, every norm zero-centred but the delta net's own. Attention gates its
output and rotates the first quarter of a head; a text token has equal multi-axis positions, so
rope is the plain one. One more layer predicts the token after next (`draft`).
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
from .layers.attention import Heads, declare_kv
from .layers.gated_attention import declare_gated_attention, gated_attention
from .layers.gated_moe import GatedExperts, declare_gated_moe, gated_moe
from .layers.gdn import Delta, declare_gdn, declare_gdn_caches, gdn
from .layers.head import declare_vocabulary, embed_tokens, vocabulary_logits
from .layers.mlp import declare_mlp, mlp
from .layers.norm import rms_norm
from .layers.rope import Rope, angles, read_rope
from .layers.stack import Layer, pick, run_layers, tap
from .params import Dim, Param, Tree, also_spelled

LINEAR, FULL = "linear_attention", "full_attention"
SYNONYMS = {"mamba": LINEAR, "attention": FULL}
IGNORED = ("model.visual.", "visual.")
"""The vision tower."""


@dataclasses.dataclass(frozen=True)
class Config:
    vocab: int
    hidden: int
    kinds: tuple[str, ...]
    heads: int
    kv_heads: int
    head_dim: int
    delta: Delta
    width: int
    experts: GatedExperts | None
    eps: float
    rope: Rope
    attention_bias: bool
    tied: bool
    drafts: int
    max_positions: int
    eos: tuple[int, ...]

    @property
    def layers(self) -> int:
        return len(self.kinds)

    @property
    def stack(self) -> tuple[int, ...]:
        return tuple(range(self.layers))

    @property
    def draft_stack(self) -> tuple[int, ...]:
        return tuple(range(self.drafts))

    def of(self, kind: str) -> tuple[int, ...]:
        return tuple(i for i, k in enumerate(self.kinds) if k == kind)

    def attention(self, ranks: int) -> Heads:
        layout = grouped_heads(self.heads, self.kv_heads, ranks)
        scale = self.head_dim**-0.5
        return Heads(layout, self.head_dim, self.head_dim, scale, eps=self.eps, zero_centred=True)


def read_config(values: Mapping[str, Any]) -> Config:
    r = ConfigReader(text_section(values))
    return Config(**read_common(r, values), width=r.read("intermediate_size", int), experts=None)


def read_common(r: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `Config` that the dense and the expert models share."""
    r.require("hidden_act", ("silu",), "silu")
    head_dim = r.read("head_dim", int, 256)
    factor = r.section("rope_parameters") or r
    rotary = factor.read(
        "partial_rotary_factor", float, r.read("partial_rotary_factor", float, 0.25)
    )
    return {
        "vocab": r.read("vocab_size", int),
        "hidden": r.read("hidden_size", int),
        "kinds": read_kinds(r, FULL, SYNONYMS),
        "heads": r.read("num_attention_heads", int),
        "kv_heads": r.read("num_key_value_heads", int),
        "head_dim": head_dim,
        "delta": read_delta(r, "silu"),
        "eps": r.read("rms_norm_eps", float, 1e-6),
        "rope": read_rope(r, int(head_dim * rotary)),
        "attention_bias": r.read("attention_bias", bool, False),
        "tied": read_tied(values),
        "drafts": r.read("mtp_num_hidden_layers", int, 0),
        "max_positions": r.read("max_position_embeddings", int, 32768),
        "eos": r.tokens("eos_token_id"),
    }


def read_kinds(r: ConfigReader, full: str, synonyms: Mapping[str, str]) -> tuple[str, ...]:
    """The kind of every layer."""
    layers = r.read("num_hidden_layers", int)
    kinds = r.read("layer_types", list, None)
    if kinds is None:
        every = r.read("full_attention_interval", int, 4, least=1)
        kinds = [LINEAR if (i + 1) % every else full for i in range(layers)]
    found = tuple(synonyms.get(kind, kind) for kind in kinds)
    if len(found) != layers or not set(found) <= {LINEAR, full}:
        raise r.refuse("layer_types", kinds, f"{layers} entries of {LINEAR} or {full}")
    return found


def read_delta(r: ConfigReader, gate: str) -> Delta:
    key_heads, value_heads = (
        r.read("linear_num_key_heads", int),
        r.read("linear_num_value_heads", int),
    )
    if value_heads % key_heads:
        raise r.refuse(
            "linear_num_value_heads", value_heads, f"multiples of linear_num_key_heads {key_heads}"
        )
    return Delta(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=r.read("linear_key_head_dim", int, 128),
        value_dim=r.read("linear_value_head_dim", int, 128),
        width=r.read("linear_conv_kernel_dim", int, 4),
        eps=r.read("rms_norm_eps", float, 1e-6),
        gate=gate,
    )


def read_tied(values: Mapping[str, Any]) -> bool:
    """Whether the head is the embedding: the outer config decides where there are two."""
    outer = ConfigReader(values).read("tie_word_embeddings", bool, None)
    return (
        ConfigReader(text_section(values)).read("tie_word_embeddings", bool, False)
        if outer is None
        else outer
    )


def declare(config: Config, ranks: int) -> Tree:
    layers, embed, prefix = config.stack, Dim(config.hidden, "embed"), "model.language_model"
    tree: Tree = {
        "embed": declare_vocabulary(
            config.vocab, config.hidden, f"{prefix}.embed_tokens.weight", ranks
        ),
        "layers": _declare_layers(config, layers, f"{prefix}.layers.{{layer}}", ranks),
        "norm": Param(f"{prefix}.norm.weight", (embed,), init="zeros"),
    }
    if full := config.of(FULL):
        tree["layers"]["attention"] = declare_gated_attention(
            config.attention(ranks),
            config.hidden,
            full,
            f"{prefix}.layers.{{layer}}.self_attn",
            bias=config.attention_bias,
        )
    if linears := config.of(LINEAR):
        tree["layers"]["gdn"] = declare_gdn(
            config.delta, config.hidden, linears, f"{prefix}.layers.{{layer}}.linear_attn", ranks
        )
    if not config.tied:
        tree["head"] = declare_vocabulary(config.vocab, config.hidden, "lm_head.weight", ranks)
    return also_spelled(tree, f"{prefix}.", "model.")


def _declare_layers(config: Config, layers: tuple[int, ...], prefix: str, ranks: int) -> Tree:
    """Norms and MLP of every layer."""
    tree: Tree = {
        name: Param(
            f"{prefix}.{spelling}.weight", (Dim(config.hidden, "embed"),), layers, init="zeros"
        )
        for name, spelling in (
            ("input_norm", "input_layernorm"),
            ("post_norm", "post_attention_layernorm"),
        )
    }
    if config.experts is None:
        tree["mlp"] = declare_mlp(config.hidden, config.width, layers, f"{prefix}.mlp", ranks)
    else:
        tree["mlp"] = declare_gated_moe(
            config.experts, config.hidden, layers, f"{prefix}.mlp", ranks
        )
    return tree


def declare_caches(config: Config, ranks: int) -> dict[str, caches.Declaration]:
    planes: dict[str, caches.Declaration] = {}
    if full := config.of(FULL):
        planes |= declare_kv(config.attention(ranks), full)
    if linears := config.of(LINEAR):
        planes |= declare_gdn_caches(config.delta, linears, ranks)
    return planes


def _norm(x: jax.Array, weight: jax.Array, at: Any, config: Config) -> jax.Array:
    return rms_norm(x, weight, at, eps=config.eps, zero_centred=True)


def _feed(
    x: jax.Array, p: Any, at: Any, batch: Batch, config: Config, context: Context
) -> jax.Array:
    with jax.named_scope("mlp"):
        y = _norm(x, p["post_norm"], at, config)
        if config.experts is None:
            return mlp(y, p["mlp"], at, batch, context)
        return gated_moe(y, p["mlp"], at, config.experts, batch, context)


def forward(
    params: Any,
    cache: caches.Caches,
    batch: Batch,
    config: Config,
    context: Context,
    taps: tuple[int, ...] = (),
    capture: Collection[str] = (),
) -> Output:
    p, heads = params["layers"], config.attention(context.ranks)
    x = embed_tokens(params["embed"], batch, context)
    rope = angles(config.rope, batch.positions)
    tapped = jnp.zeros((len(taps), *x.shape), x.dtype) if taps else None

    def block(carry: Any, layer: Layer) -> Any:
        x, cache, tapped = carry
        at, own = layer.within(config.stack), layer.within(config.of(layer.kind))
        y = _norm(x, p["input_norm"], at, config)
        if layer.kind == FULL:
            with jax.named_scope("attention"):
                mixed, cache = gated_attention(
                    y, p["attention"], own, cache, ("k", "v"), own, batch, heads, context, rope
                )
        else:
            with jax.named_scope("gdn"):
                mixed, cache = gdn(y, p["gdn"], own, cache, own, batch, config.delta, context)
        x = x + mixed
        fed = _feed(x, p, at, batch, config, context)
        x = x + fed
        seen = {"mixer_out": mixed, "mlp_out": fed, "residual": x}
        return (x, cache, tap(tapped, taps, layer, x)), pick(seen, capture)

    first = pick({"embed": x}, capture)
    (x, cache, tapped), captured = run_layers(config.kinds, block, (x, cache, tapped))
    return Output(x, tapped, cache, first | captured)


def final(params: Any, residual: jax.Array, config: Config, context: Context) -> jax.Array:
    return _norm(residual, params["norm"], None, config)


def logits(
    params: Any,
    residual: jax.Array,
    config: Config,
    context: Context,
    rows: jax.Array | None = None,
) -> jax.Array:
    x = final(params, residual, config, context)
    return vocabulary_logits(x, params.get("head", params["embed"]), config.vocab, context, rows)


# --- Drafting -----------------------------------------------------------------------------------


def declare_draft(config: Config, ranks: int) -> Tree:
    """The prediction layers `mtp.*`: attention, and the model's kind of MLP."""
    if not config.drafts:
        return {}
    embed, layers = Dim(config.hidden, "embed"), config.draft_stack

    def norm(name: str) -> Param:
        return Param(f"mtp.{name}.weight", (embed,), init="zeros")

    return {
        "fc": Param("mtp.fc.weight", (embed, Dim(2 * config.hidden))),
        "embedding_norm": norm("pre_fc_norm_embedding"),
        "hidden_norm": norm("pre_fc_norm_hidden"),
        "layers": _declare_layers(config, layers, "mtp.layers.{layer}", ranks)
        | {
            "attention": declare_gated_attention(
                config.attention(ranks),
                config.hidden,
                layers,
                "mtp.layers.{layer}.self_attn",
                bias=config.attention_bias,
            )
        },
        "norm": norm("norm"),
    }


def declare_draft_caches(config: Config, ranks: int) -> dict[str, caches.Declaration]:
    if not config.drafts:
        return {}
    planes = declare_kv(config.attention(ranks), config.draft_stack)
    return {f"draft_{name}": plane for name, plane in planes.items()}


def draft(
    params: Any,
    cache: caches.Caches,
    batch: Batch,
    hidden: jax.Array,
    config: Config,
    context: Context,
    depth: int = 0,
) -> tuple[jax.Array, jax.Array, caches.Caches]:
    """x = fc [norm(embed(next token)) | norm(hidden)], one layer, norm, the main head.

    Args:
      batch: its tokens are those that follow the ones of `hidden`.
      hidden: [B, Q, H], after the main model's final norm, or what depth - 1 carried.
      depth: which prediction layer; they take turns.

    Returns:
      float32 logits [B, Q, vocab], the carry for the next depth [B, Q, H], and the caches.
    """
    d = params["draft"]
    p, at = d["layers"], depth % config.drafts
    e = embed_tokens(params["embed"], batch, context)
    joined = [
        _norm(e, d["embedding_norm"], None, config),
        _norm(hidden.astype(e.dtype), d["hidden_norm"], None, config),
    ]
    x = linear(jnp.concatenate(joined, axis=-1), d["fc"], context=context, rows=batch.rows)
    with jax.named_scope("attention"):
        mixed, cache = gated_attention(
            _norm(x, p["input_norm"], at, config),
            p["attention"],
            at,
            cache,
            ("draft_k", "draft_v"),
            at,
            batch,
            config.attention(context.ranks),
            context,
            angles(config.rope, batch.positions),
        )
    x = x + mixed
    x = x + _feed(x, p, at, batch, config, context)
    carry = _norm(x, d["norm"], None, config)
    head = params.get("head", params["embed"])
    return vocabulary_logits(carry, head, config.vocab, context), carry, cache
