"""llama: pre-norm decoder of grouped-query attention with rope and a SwiGLU MLP (SmolLM2, Llama).

Touvron et al. 2023. Biases only where the config asks for them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp

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
from .layers.stack import Layer, pick, run_layers, tap
from .params import Dim, Param, Tree

ROW_INVARIANT = True
"""All products over a row go through `linear` and `paged_attention` (see `Family`)."""


@dataclasses.dataclass(frozen=True)
class Config:
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    eps: float
    rope: Rope
    tied: bool
    max_positions: int
    eos: tuple[int, ...]
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_norms: bool = False

    @property
    def stack(self) -> tuple[int, ...]:
        return tuple(range(self.layers))

    def attention(self, ranks: int) -> Heads:
        layout = grouped_heads(self.heads, self.kv_heads, ranks)
        return Heads(layout, self.head_dim, self.head_dim, self.head_dim**-0.5, eps=self.eps)


def read_config(values: Mapping[str, Any]) -> Config:
    r = ConfigReader(text_section(values))
    r.require("hidden_act", ("silu",), "silu")
    hidden, heads = r.read("hidden_size", int), r.read("num_attention_heads", int)
    head_dim = r.read("head_dim", int, hidden // heads)
    bias = r.read("attention_bias", bool, False)
    return Config(
        vocab=r.read("vocab_size", int),
        hidden=hidden,
        layers=r.read("num_hidden_layers", int),
        heads=heads,
        kv_heads=r.read("num_key_value_heads", int, heads),
        head_dim=head_dim,
        width=r.read("intermediate_size", int),
        eps=r.read("rms_norm_eps", float, 1e-6),
        rope=read_rope(r, head_dim),
        tied=r.read("tie_word_embeddings", bool, False),
        max_positions=r.read("max_position_embeddings", int, 2048),
        eos=r.tokens("eos_token_id"),
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=r.read("mlp_bias", bool, False),
    )


def declare(config: Config, ranks: int) -> Tree:
    layers, embed = config.stack, Dim(config.hidden, "embed")

    def norm(name: str) -> Param:
        return Param(f"model.layers.{{layer}}.{name}.weight", (embed,), layers, init="ones")

    tree: Tree = {
        "embed": declare_vocabulary(config.vocab, config.hidden, "model.embed_tokens.weight", ranks),
        "layers": {
            "input_norm": norm("input_layernorm"),
            "attention": declare_attention(
                config.attention(ranks),
                config.hidden,
                layers,
                "model.layers.{layer}.self_attn",
                bias=config.attention_bias,
                output_bias=config.output_bias,
                head_norms=config.head_norms,
            ),
            "post_norm": norm("post_attention_layernorm"),
            "mlp": declare_mlp(
                config.hidden,
                config.width,
                layers,
                "model.layers.{layer}.mlp",
                ranks,
                bias=config.mlp_bias,
            ),
        },
        "norm": Param("model.norm.weight", (embed,), init="ones"),
    }
    if not config.tied:
        tree["head"] = declare_vocabulary(config.vocab, config.hidden, "lm_head.weight", ranks)
    return tree


def declare_caches(config: Config, ranks: int) -> dict[str, caches.Declaration]:
    return declare_kv(config.attention(ranks), config.stack)


def forward(
    params: Any,
    cache: caches.Caches,
    batch: Batch,
    config: Config,
    context: Context,
    taps: tuple[int, ...] = (),
    capture: Collection[str] = (),
) -> Output:
    p, layers, heads = params["layers"], config.stack, config.attention(context.ranks)
    x = embed_tokens(params["embed"], batch, context)
    rope = angles(config.rope, batch.positions)
    tapped = jnp.zeros((len(taps), *x.shape), x.dtype) if taps else None

    def block(carry: Any, layer: Layer) -> Any:
        x, cache, tapped = carry
        at = layer.within(layers)
        with jax.named_scope("attention"):
            y = rms_norm(x, p["input_norm"], at, eps=config.eps)
            mixed, cache = attention(
                y, p["attention"], cache, ("k", "v"), batch, layer, heads, layers, context, rope, layers
            )
            x = x + mixed
        with jax.named_scope("mlp"):
            y = rms_norm(x, p["post_norm"], at, eps=config.eps)
            fed = mlp(y, p["mlp"], at, batch, context)
            x = x + fed
        seen = {"mixer_out": mixed, "mlp_out": fed, "residual": x}
        return (x, cache, tap(tapped, taps, layer, x)), pick(seen, capture)

    first = pick({"embed": x}, capture)
    (x, cache, tapped), captured = run_layers(("dense",) * config.layers, block, (x, cache, tapped))
    return Output(x, tapped, cache, first | captured)


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
