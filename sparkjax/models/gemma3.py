"""gemma3: sandwich norms, sliding-window layers between global ones, gelu gate (Gemma team 2025).

Zero-centred norms everywhere; sliding layers have their own rope base and keep their keys in
rings; the embedding is scaled by sqrt(hidden), rounded to the weights' dtype.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..mesh.context import Context
from ..mesh.units import grouped_heads
from . import cache as caches
from .batch import Batch
from .config import ConfigReader, text_section
from .family import Output
from .layers.attention import Heads, attention, declare_attention, declare_kv, softcap
from .layers.head import declare_vocabulary, embed_tokens, vocabulary_logits
from .layers.mlp import declare_mlp, mlp
from .layers.norm import rms_norm
from .layers.rope import Rope, angles, read_rope
from .layers.stack import Layer, pick, run_layers, tap
from .params import Dim, Param, Tree

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclasses.dataclass(frozen=True)
class Config:
    vocab: int
    hidden: int
    kinds: tuple[str, ...]
    heads: int
    kv_heads: int
    head_dim: int
    scalar: float
    width: int
    activation: str
    window: int
    eps: float
    ropes: tuple[tuple[str, Rope], ...]
    attention_bias: bool
    attention_softcap: float
    final_softcap: float
    tied: bool
    weights: str
    max_positions: int
    eos: tuple[int, ...]

    @property
    def layers(self) -> int:
        return len(self.kinds)

    @property
    def stack(self) -> tuple[int, ...]:
        return tuple(range(self.layers))

    def of(self, kind: str) -> tuple[int, ...]:
        return tuple(i for i, k in enumerate(self.kinds) if k == kind)

    def attention(self, kind: str, ranks: int) -> Heads:
        return Heads(
            grouped_heads(self.heads, self.kv_heads, ranks),
            self.head_dim,
            self.head_dim,
            self.scalar**-0.5,
            window=self.window if kind == SLIDING else 0,
            softcap=self.attention_softcap,
            eps=self.eps,
            zero_centred=True,
        )


def read_config(values: Mapping[str, Any]) -> Config:
    r = ConfigReader(text_section(values))
    activation = r.require(
        "hidden_activation", ("gelu_pytorch_tanh",), r.read("hidden_act", str, "gelu_pytorch_tanh")
    )
    r.require("use_bidirectional_attention", (False,), False)
    layers = r.read("num_hidden_layers", int)
    kinds = r.read("layer_types", list, None)
    if kinds is None:
        every = r.read("sliding_window_pattern", int, 6, also=("_sliding_window_pattern",))
        kinds = [SLIDING if (i + 1) % every else FULL for i in range(layers)]
    if len(kinds) != layers or not set(kinds) <= {SLIDING, FULL}:
        raise r.refuse("layer_types", kinds, f"{layers} entries of {SLIDING} or {FULL}")
    head_dim = r.read("head_dim", int, 256)
    local = read_rope(r, head_dim, SLIDING)
    if r.section("rope_parameters") is None:
        local = Rope(head_dim, r.read("rope_local_base_freq", float, 10000.0))
        full = read_rope(ConfigReader({"rope_theta": 1e6, **text_section(values)}), head_dim)
    else:
        full = read_rope(r, head_dim, FULL)
    return Config(
        vocab=r.read("vocab_size", int, 262144),
        hidden=r.read("hidden_size", int),
        kinds=tuple(kinds),
        heads=r.read("num_attention_heads", int),
        kv_heads=r.read("num_key_value_heads", int),
        head_dim=head_dim,
        scalar=r.read("query_pre_attn_scalar", float, 256.0),
        width=r.read("intermediate_size", int),
        activation=activation,
        window=r.read("sliding_window", int),
        eps=r.read("rms_norm_eps", float, 1e-6),
        ropes=((SLIDING, local), (FULL, full)),
        attention_bias=r.read("attention_bias", bool, False),
        attention_softcap=r.read("attn_logit_softcapping", float, 0.0),
        final_softcap=r.read("final_logit_softcapping", float, 0.0),
        tied=r.read("tie_word_embeddings", bool, True),
        weights=r.read("dtype", str, "bfloat16", also=("torch_dtype",)),
        max_positions=r.read("max_position_embeddings", int, 131072),
        eos=r.tokens("eos_token_id"),
    )


def declare(config: Config, ranks: int) -> Tree:
    layers, embed = config.stack, Dim(config.hidden, "embed")

    def norm(name: str) -> Param:
        return Param(f"model.layers.{{layer}}.{name}.weight", (embed,), layers, init="zeros")

    tree: Tree = {
        "embed": declare_vocabulary(config.vocab, config.hidden, "model.embed_tokens.weight", ranks),
        "layers": {
            "input_norm": norm("input_layernorm"),
            "attention": declare_attention(
                config.attention(FULL, ranks),
                config.hidden,
                layers,
                "model.layers.{layer}.self_attn",
                bias=config.attention_bias,
                output_bias=config.attention_bias,
                head_norms=True,
            ),
            "post_attention_norm": norm("post_attention_layernorm"),
            "pre_mlp_norm": norm("pre_feedforward_layernorm"),
            "mlp": declare_mlp(
                config.hidden, config.width, layers, "model.layers.{layer}.mlp", ranks
            ),
            "post_mlp_norm": norm("post_feedforward_layernorm"),
        },
        "norm": Param("model.norm.weight", (embed,), init="zeros"),
    }
    if not config.tied:
        tree["head"] = declare_vocabulary(config.vocab, config.hidden, "lm_head.weight", ranks)
    return tree


def declare_caches(config: Config, ranks: int) -> dict[str, caches.Declaration]:
    planes: dict[str, caches.Declaration] = {}
    for kind, prefix in ((SLIDING, "ring_"), (FULL, "")):
        if layers := config.of(kind):
            declared = declare_kv(config.attention(kind, ranks), layers)
            planes |= {prefix + name: plane for name, plane in declared.items()}
    return planes


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
    # The published factor is rounded to the dtype of the weights.
    scale = float(np.asarray(config.hidden**0.5, jnp.dtype(config.weights)))
    x = embed_tokens(params["embed"], batch, context, scale)
    ropes = {kind: angles(rope, batch.positions) for kind, rope in config.ropes}
    tapped = jnp.zeros((len(taps), *x.shape), x.dtype) if taps else None

    def norm(x: jax.Array, name: str, at: Any) -> jax.Array:
        return rms_norm(x, p[name], at, eps=config.eps, zero_centred=True)

    def block(carry: Any, layer: Layer) -> Any:
        x, cache, tapped = carry
        at, kind = layer.within(layers), layer.kind
        with jax.named_scope("attention" if kind == FULL else "sliding_attention"):
            mixed, cache = attention(
                norm(x, "input_norm", at),
                p["attention"],
                cache,
                ("k", "v") if kind == FULL else ("ring_k", "ring_v"),
                batch,
                layer,
                config.attention(kind, context.ranks),
                layers,
                context,
                ropes[kind],
                config.of(kind),
            )
            x = x + norm(mixed, "post_attention_norm", at)
        with jax.named_scope("mlp"):
            fed = mlp(norm(x, "pre_mlp_norm", at), p["mlp"], at, batch, context, config.activation)
            x = x + norm(fed, "post_mlp_norm", at)
        seen = {"mixer_out": mixed, "mlp_out": fed, "residual": x}
        return (x, cache, tap(tapped, taps, layer, x)), pick(seen, capture)

    first = pick({"embed": x}, capture)
    (x, cache, tapped), captured = run_layers(config.kinds, block, (x, cache, tapped))
    return Output(x, tapped, cache, first | captured)


def final(params: Any, residual: jax.Array, config: Config, context: Context) -> jax.Array:
    return rms_norm(residual, params["norm"], eps=config.eps, zero_centred=True)


def logits(
    params: Any,
    residual: jax.Array,
    config: Config,
    context: Context,
    rows: jax.Array | None = None,
) -> jax.Array:
    x = final(params, residual, config, context)
    raw = vocabulary_logits(x, params.get("head", params["embed"]), config.vocab, context, rows)
    return softcap(raw, config.final_softcap)
