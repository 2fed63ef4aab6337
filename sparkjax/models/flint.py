"""flint: sliding attention with rope between full attention without positions, a sink on every
head, and sigmoid-routed experts beside an ungated shared one (RecursiveSI).

A layer is x += attention(norm(x)); x += mlp_or_moe(norm(x)). All norms, also those of queries and
keys, multiply in float32 and cast once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..kernels.linear import linear_float32
from ..mesh.context import Context
from ..mesh.units import grouped_heads
from . import cache as caches
from .batch import Batch
from .config import ConfigReader, text_section
from .family import Output
from .layers.attention import Heads, attention, declare_attention, declare_kv, declare_sinks
from .layers.head import declare_vocabulary, embed_tokens, vocabulary_logits
from .layers.mlp import declare_mlp, mlp
from .layers.moe import declare_experts, route_noaux, routed
from .layers.norm import rms_norm
from .layers.rope import Rope, angles, read_rope
from .layers.shared_moe import DENSE, SPARSE
from .layers.stack import Layer, pick, run_layers, tap
from .params import Dim, Param, Tree

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclasses.dataclass(frozen=True)
class Config:
    vocab: int
    hidden: int
    mixers: tuple[str, ...]
    mlps: tuple[str, ...]
    heads: int
    kv_heads: int
    head_dim: int
    window: int
    width: int
    experts: int
    expert_width: int
    shared_width: int
    k: int
    normalise: bool
    eps: float
    rope: Rope
    attention_bias: bool
    tied: bool
    max_positions: int
    eos: tuple[int, ...]

    @property
    def layers(self) -> int:
        return len(self.mixers)

    @property
    def stack(self) -> tuple[int, ...]:
        return tuple(range(self.layers))

    @property
    def kinds(self) -> tuple[tuple[str, str], ...]:
        return tuple(zip(self.mixers, self.mlps, strict=True))

    def of(self, kind: str) -> tuple[int, ...]:
        """The layers with this attention or MLP."""
        return tuple(i for i, both in enumerate(self.kinds) if kind in both)

    def attention(self, kind: str, ranks: int) -> Heads:
        return Heads(
            grouped_heads(self.heads, self.kv_heads, ranks),
            self.head_dim,
            self.head_dim,
            self.head_dim**-0.5,
            window=self.window if kind == SLIDING else 0,
            eps=self.eps,
            late_cast=True,
        )


def read_config(values: Mapping[str, Any]) -> Config:
    r = ConfigReader(text_section(values))
    r.require("hidden_act", ("silu",), "silu")
    layers, experts = r.read("num_hidden_layers", int), r.read("num_experts", int)
    mixers = r.read("layer_types", list, None)
    if mixers is None:
        full = {0, 1, *range(1, layers, 4), layers - 1}
        mixers = [FULL if i in full else SLIDING for i in range(layers)]
    if len(mixers) != layers or not set(mixers) <= {SLIDING, FULL}:
        raise r.refuse("layer_types", mixers, f"{layers} entries of {SLIDING} or {FULL}")
    dense, step = r.read("mlp_only_layers", list, [0, 1]), r.read("decoder_sparse_step", int, 1, least=1)
    sparse = [experts > 0 and i not in dense and not (i + 1) % step for i in range(layers)]
    k = r.read("num_experts_per_tok", int)
    if any(sparse) and not 1 <= k <= experts:
        raise r.refuse("num_experts_per_tok", k, f"1 to num_experts {experts}")
    heads, hidden = r.read("num_attention_heads", int), r.read("hidden_size", int)
    head_dim = r.read("head_dim", int, hidden // heads)
    return Config(
        vocab=r.read("vocab_size", int),
        hidden=hidden,
        mixers=tuple(mixers),
        mlps=tuple(SPARSE if s else DENSE for s in sparse),
        heads=heads,
        kv_heads=r.read("num_key_value_heads", int, heads),
        head_dim=head_dim,
        window=r.read("sliding_window", int) if SLIDING in mixers else 0,
        width=r.read("intermediate_size", int),
        experts=experts,
        expert_width=r.read("moe_intermediate_size", int),
        shared_width=r.read("shared_expert_intermediate_size", int),
        k=k,
        normalise=r.read("norm_topk_prob", bool, True),
        eps=r.read("rms_norm_eps", float, 1e-6),
        rope=read_rope(r, head_dim),
        attention_bias=r.read("attention_bias", bool, False),
        tied=r.read("tie_word_embeddings", bool, False),
        max_positions=r.read("max_position_embeddings", int, 262144),
        eos=r.tokens("eos_token_id"),
    )


# --- Declarations -------------------------------------------------------------------------------


def _declare_moe(config: Config, layers: tuple[int, ...], ranks: int) -> Tree:
    prefix, hidden = "model.layers.{layer}.mlp", config.hidden
    gate = (Dim(config.experts), Dim(hidden, "embed"))
    return {
        "gate": Param(f"{prefix}.gate.weight", gate, layers),
        "experts": declare_experts(
            hidden, config.expert_width, config.experts, layers, f"{prefix}.experts", ranks
        ),
        "shared": declare_mlp(hidden, config.shared_width, layers, f"{prefix}.shared_expert", ranks),
    }


def declare(config: Config, ranks: int) -> Tree:
    layers, embed, hidden = config.stack, Dim(config.hidden, "embed"), config.hidden
    prefix, heads = "model.layers.{layer}", config.attention(FULL, ranks)

    def norm(name: str) -> Param:
        return Param(f"{prefix}.{name}.weight", (embed,), layers, init="ones")

    tree: Tree = {
        "input_norm": norm("input_layernorm"),
        "attention": declare_attention(
            heads,
            hidden,
            layers,
            f"{prefix}.self_attn",
            bias=config.attention_bias,
            output_bias=config.attention_bias,
            head_norms=True,
        ),
        "sinks": declare_sinks(
            heads, layers, f"{prefix}.self_attn.softmax_offset", f"{prefix}.self_attn.sinks"
        ),
        "post_norm": norm("post_attention_layernorm"),
    }
    if dense := config.of(DENSE):
        tree["mlp"] = declare_mlp(hidden, config.width, dense, f"{prefix}.mlp", ranks)
    if sparse := config.of(SPARSE):
        tree["moe"] = _declare_moe(config, sparse, ranks)
    tree = {
        "embed": declare_vocabulary(config.vocab, hidden, "model.embed_tokens.weight", ranks),
        "layers": tree,
        "norm": Param("model.norm.weight", (embed,), init="ones"),
    }
    if not config.tied:
        tree["head"] = declare_vocabulary(config.vocab, hidden, "lm_head.weight", ranks)
    return tree


def declare_caches(config: Config, ranks: int) -> dict[str, caches.Declaration]:
    planes: dict[str, caches.Declaration] = {}
    for kind, prefix in ((SLIDING, "ring_"), (FULL, "")):
        if layers := config.of(kind):
            declared = declare_kv(config.attention(kind, ranks), layers)
            planes |= {prefix + name: plane for name, plane in declared.items()}
    return planes


# --- The pass -----------------------------------------------------------------------------------


def _moe(
    y: jax.Array, p: Any, at: Any, config: Config, batch: Batch, context: Context
) -> jax.Array:
    """sum_e w_e expert_e(y) + shared(y): the k largest of s = sigmoid(W y), w = s / sum s."""
    scores = jax.nn.sigmoid(linear_float32(y, p["gate"], at, context=context))
    ids, weights = route_noaux(scores, None, config.k, normalise=config.normalise, eps=0.0)
    out = routed(y, p["experts"], at, ids, weights, batch, context=context)
    return context.all_reduce(out + mlp(y, p["shared"], at, batch, context, reduce=False))


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

    def norm(x: jax.Array, name: str, at: Any) -> jax.Array:
        return rms_norm(x, p[name], at, eps=config.eps, late_cast=True)

    def block(carry: Any, layer: Layer) -> Any:
        x, cache, tapped = carry
        at, (mixer, feed) = layer.within(layers), layer.kind
        sliding = mixer == SLIDING
        with jax.named_scope("sliding_attention" if sliding else "attention"):
            mixed, cache = attention(
                norm(x, "input_norm", at),
                p["attention"],
                cache,
                ("ring_k", "ring_v") if sliding else ("k", "v"),
                batch,
                layer,
                config.attention(mixer, context.ranks),
                layers,
                context,
                rope if sliding else None,
                config.of(mixer),
                sinks=p["sinks"][at],
            )
            x = x + mixed
        with jax.named_scope("mlp" if feed == DENSE else "moe"):
            y, at = norm(x, "post_norm", at), layer.within(config.of(feed))
            if feed == DENSE:
                fed = mlp(y, p["mlp"], at, batch, context)
            else:
                fed = _moe(y, p["moe"], at, config, batch, context)
            x = x + fed
        seen = {"mixer_out": mixed, "mlp_out": fed, "residual": x}
        return (x, cache, tap(tapped, taps, layer, x)), pick(seen, capture)

    first = pick({"embed": x}, capture)
    (x, cache, tapped), captured = run_layers(config.kinds, block, (x, cache, tapped))
    return Output(x, tapped, cache, first | captured)


def final(params: Any, residual: jax.Array, config: Config, context: Context) -> jax.Array:
    return rms_norm(residual, params["norm"], eps=config.eps, late_cast=True)


def logits(
    params: Any,
    residual: jax.Array,
    config: Config,
    context: Context,
    rows: jax.Array | None = None,
) -> jax.Array:
    x = final(params, residual, config, context)
    return vocabulary_logits(x, params.get("head", params["embed"]), config.vocab, context, rows)
