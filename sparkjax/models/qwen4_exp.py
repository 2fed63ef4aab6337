"""qwen4_exp: several gated residual streams around delta nets and sparse attention, with an
n-gram memory (Qwen3.8-Flash-Next).

Against qwen3_5_moe: streams with a gated site around every sub-layer stand in for the residual,
its norms and the final norm; attention reads only the blocks that an indexer picks; the delta
net's output gate is a sigmoid; one layer adds rows of an n-gram table, looked up on the host, to
the streams before anything else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..kernels.linear import linear
from ..mesh.context import Context
from ..mesh.units import grouped_heads
from . import cache as caches
from .batch import Batch
from .config import ConfigReader, text_section
from .family import Drafts, Output
from .layers.attention import Heads, declare_kv
from .layers.block_indexer import (
    BlockIndex,
    declare_block_indexer,
    declare_block_keys,
    select_blocks,
)
from .layers.gated_attention import declare_gated_attention, gated_attention
from .layers.gated_moe import GatedExperts, declare_gated_moe, gated_moe, read_gated_experts
from .layers.gated_residual import add, collapse, declare_site, last_mix
from .layers.gdn import Delta, declare_gdn, declare_gdn_caches, gdn
from .layers.head import declare_vocabulary, embed_tokens, vocabulary_logits
from .layers.ngram import (
    NGram,
    declare_ngram,
    declare_ngram_caches,
    declare_ngram_tables,
    ngram_memory,
    ngram_prelude,
    ngram_shapes,
)
from .layers.norm import rms_norm
from .layers.rope import Rope, angles, read_rope
from .layers.stack import Layer, pick, run_layers, tap
from .params import Dim, Param, Tree, also_spelled
from .qwen3_5 import LINEAR, read_delta, read_kinds, read_tied
from .tables import Table, Tables

SPARSE = "indexed_attention"
SYNONYMS = {
    "mamba": LINEAR,
    "attention": SPARSE,
    "full_attention": SPARSE,
    "qwen_sparse_attention": SPARSE,
    "deepseek_sparse_attention": SPARSE,
}
PREFIX = "model.language_model"
IGNORED = (
    "model.visual.",
    "visual.",
    "model.*.ple.ple_embedding.token_lookup",
    "model.*.ple.ple_embedding.hashstats_",
)
"""The vision tower, and statistics of the n-gram table."""


DRAFTS = Drafts(reads="residual")
"""The prediction layer reads all streams."""


@dataclasses.dataclass(frozen=True)
class Config:
    vocab: int
    hidden: int
    mixers: tuple[str, ...]
    heads: int
    kv_heads: int
    head_dim: int
    delta: Delta
    index: BlockIndex
    experts: GatedExperts
    streams: int
    site_rank: int
    ngram: NGram | None
    memories: tuple[int, ...]
    eps: float
    rope: Rope
    attention_bias: bool
    tied: bool
    drafts: int
    max_positions: int
    eos: tuple[int, ...]

    @property
    def layers(self) -> int:
        return len(self.mixers)

    @property
    def kinds(self) -> tuple[tuple[str, int | None], ...]:
        """(mixer, which n-gram memory comes before it) of every layer."""
        return tuple(
            (mixer, self.memories.index(i) if i in self.memories else None)
            for i, mixer in enumerate(self.mixers)
        )

    @property
    def stack(self) -> tuple[int, ...]:
        return tuple(range(self.layers))

    @property
    def draft_stack(self) -> tuple[int, ...]:
        return tuple(range(self.drafts))

    def of(self, mixer: str) -> tuple[int, ...]:
        return tuple(i for i, m in enumerate(self.mixers) if m == mixer)

    def attention(self, ranks: int) -> Heads:
        layout = grouped_heads(self.heads, self.kv_heads, ranks)
        scale = self.head_dim**-0.5
        return Heads(layout, self.head_dim, self.head_dim, scale, eps=self.eps, zero_centred=True)


def read_config(values: Mapping[str, Any]) -> Config:
    r = ConfigReader(text_section(values))
    r.require("hidden_act", ("silu",), "silu")
    hidden, head_dim = r.read("hidden_size", int), r.read("head_dim", int, 256)
    eps, eos = r.read("rms_norm_eps", float, 1e-6), r.tokens("eos_token_id")
    mixers = read_kinds(r, SPARSE, SYNONYMS)
    factor = r.section("rope_parameters") or r
    rotary = factor.read(
        "partial_rotary_factor", float, r.read("partial_rotary_factor", float, 1.0)
    )
    streams = r.read("hc_count", int, 4, least=1)
    if streams < 2:
        raise r.refuse("hc_count", streams, "2 or more")
    memories = _read_memories(r, mixers)
    index = _read_index(r, eps)
    if int(head_dim * rotary) > index.dim:
        raise r.refuse(
            "indexer_head_dim", index.dim, f"at least the {int(head_dim * rotary)} rotary channels"
        )
    return Config(
        vocab=r.read("vocab_size", int),
        hidden=hidden,
        mixers=mixers,
        heads=r.read("num_attention_heads", int),
        kv_heads=r.read("num_key_value_heads", int),
        head_dim=head_dim,
        delta=read_delta(r, r.require("output_gate_type", ("sigmoid", "silu"), "silu")),
        index=index,
        experts=read_gated_experts(r),
        streams=streams,
        site_rank=r.read("hc_lowrank", int, 320),
        ngram=_read_ngram(r, hidden, eos) if memories else None,
        memories=memories,
        eps=eps,
        rope=read_rope(r, int(head_dim * rotary)),
        attention_bias=r.read("attention_bias", bool, False),
        tied=read_tied(values),
        drafts=r.read("mtp_num_hidden_layers", int, 0),
        max_positions=r.read("max_position_embeddings", int, 32768),
        eos=eos,
    )


def _read_memories(r: ConfigReader, mixers: tuple[str, ...]) -> tuple[int, ...]:
    """Layers (counted from 0) with an n-gram memory; the config counts from 1."""
    ids = r.read("ple_layer_ids", list, [])
    memories = tuple(sorted({i - 1 for i in ids}))
    if not all(0 <= i < len(mixers) and mixers[i] == LINEAR for i in memories):
        raise r.refuse("ple_layer_ids", ids, f"{LINEAR} layers, counted from 1")
    return memories


def _read_index(r: ConfigReader, eps: float) -> BlockIndex:
    r.require("indexer_kv_heads", (1,), 1)
    budget, ratio = r.read("indexer_budget", int), r.read("indexer_compress_ratio", int)
    if ratio < 1:
        raise r.refuse("indexer_compress_ratio", ratio, "1 or more")
    if budget < ratio or budget % ratio:
        raise r.refuse("indexer_budget", budget, f"multiples of indexer_compress_ratio {ratio}")
    heads, dim = r.read("indexer_n_heads", int), r.read("indexer_head_dim", int)
    return BlockIndex(heads=heads, dim=dim, budget=budget, ratio=ratio, eps=eps)


def _read_ngram(r: ConfigReader, hidden: int, eos: tuple[int, ...]) -> NGram:
    if not eos:
        raise r.refuse("eos_token_id", None, "a token id, which n-grams do not cross")
    size, heads = r.read("ngram_size", int, 3), r.read("heads_per_ngram", int, 8, least=1)
    width = r.read("ple_embed_dim", int, hidden)
    if size < 2 or heads < 1:
        raise r.refuse("ngram_size", size, "2 or more, with heads_per_ngram 1 or more")
    if width % ((size - 1) * heads):
        raise r.refuse("ple_embed_dim", width, f"multiples of {(size - 1) * heads} hashed heads")
    return NGram(
        size=size,
        heads=heads,
        width=width,
        base=r.read("ngram_vocab_size_base", int, 20_000_000),
        divisor=r.read("make_ngram_vocab_size_divisible_by", int, 128),
        vocab=r.read("vocab_size", int),
        seed=r.read("seed", int, 1234),
        end=eos[0],
        taps=r.read("ple_conv_kernel_size", int, 4),
    )


# --- Declarations -------------------------------------------------------------------------------


def declare(config: Config, ranks: int) -> Tree:
    prefix = f"{PREFIX}.layers.{{layer}}"
    layers = _declare_layers(config, config.stack, config.of(SPARSE), prefix, ranks)
    if linears := config.of(LINEAR):
        layers["gdn"] = declare_gdn(
            config.delta, config.hidden, linears, f"{prefix}.linear_attn", ranks
        )
    if config.ngram is not None:
        layers["ngram"] = declare_ngram(
            config.ngram, config.streams, config.hidden, config.memories, f"{prefix}.ple"
        )
    tree: Tree = {
        "embed": declare_vocabulary(
            config.vocab, config.hidden, f"{PREFIX}.embed_tokens.weight", ranks
        ),
        "layers": layers,
        "mixer": declare_site(
            config.streams,
            config.hidden,
            config.site_rank,
            None,
            f"{PREFIX}.hyper_connection_mixer",
            inject=False,
        ),
    }
    if not config.tied:
        tree["head"] = declare_vocabulary(config.vocab, config.hidden, "lm_head.weight", ranks)
    return also_spelled(tree, f"{PREFIX}.", "model.")


def _declare_layers(
    config: Config, layers: tuple[int, ...], sparse: tuple[int, ...], prefix: str, ranks: int
) -> Tree:
    """Sites and experts of `layers`, attention and indexer of those in `sparse`."""
    site = (config.streams, config.hidden, config.site_rank, layers)
    tree: Tree = {
        "attn_site": declare_site(*site, f"{prefix}.attn_hyper_connection"),
        "mlp_site": declare_site(*site, f"{prefix}.mlp_hyper_connection"),
        "moe": declare_gated_moe(config.experts, config.hidden, layers, f"{prefix}.mlp", ranks),
    }
    if sparse:
        tree["attention"] = declare_gated_attention(
            config.attention(ranks),
            config.hidden,
            sparse,
            f"{prefix}.self_attn",
            bias=config.attention_bias,
        )
        tree["indexer"] = declare_block_indexer(
            config.index, config.hidden, sparse, f"{prefix}.self_attn.indexer"
        )
    return tree


def declare_caches(config: Config, ranks: int) -> dict[str, caches.Declaration]:
    planes: dict[str, caches.Declaration] = {}
    if sparse := config.of(SPARSE):
        planes |= declare_kv(config.attention(ranks), sparse, config.index.width)
        planes |= declare_block_keys(config.index, sparse)
    if linears := config.of(LINEAR):
        planes |= declare_gdn_caches(config.delta, linears, ranks)
    if config.ngram is not None:
        planes |= declare_ngram_caches(config.ngram, config.streams, config.hidden, config.memories)
    return planes


def declare_tables(config: Config) -> dict[str, Table]:
    if config.ngram is None:
        return {}
    where = f"{PREFIX}.layers.{{layer}}.ple.ple_embedding"
    return dict(declare_ngram_tables(config.ngram, config.memories, where))


def prelude_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    return {} if config.ngram is None else ngram_shapes(config.ngram, len(config.memories))


def prelude(
    config: Config, opened: Tables, tokens: np.ndarray, start: int, count: int
) -> dict[str, np.ndarray]:
    if config.ngram is None:
        return {}
    return ngram_prelude(config.ngram, len(config.memories), opened, tokens, start, count)


# --- Forward ------------------------------------------------------------------------------------


def _sparse_attention(
    y: jax.Array,
    p: Any,
    at: Any,
    cache: caches.Caches,
    batch: Batch,
    config: Config,
    context: Context,
    prefix: str = "",
) -> tuple[jax.Array, caches.Caches]:
    """Attention of each token to the blocks that its indexer picks."""
    chosen, cache = select_blocks(
        y, p["indexer"], at, cache, at, batch, config.index, config.rope, context, prefix
    )
    return gated_attention(
        y,
        p["attention"],
        at,
        cache,
        (f"{prefix}k", f"{prefix}v"),
        at,
        batch,
        config.attention(context.ranks),
        context,
        angles(config.rope, batch.positions),
        chosen,
    )


def _feed(
    streams: jax.Array, p: Any, at: Any, batch: Batch, config: Config, context: Context
) -> tuple[jax.Array, jax.Array]:
    """The streams behind the experts, and what the experts gave."""
    with jax.named_scope("moe"):
        y, weights = collapse(streams, p["mlp_site"], at, config.eps, context, batch.rows)
        fed = gated_moe(y, p["moe"], at, config.experts, batch, context)
        return add(streams, fed, weights), fed


def forward(
    params: Any,
    cache: caches.Caches,
    batch: Batch,
    config: Config,
    context: Context,
    taps: tuple[int, ...] = (),
    capture: Collection[str] = (),
) -> Output:
    p = params["layers"]
    embedded = embed_tokens(params["embed"], batch, context)
    x = jnp.repeat(embedded[..., None, :], config.streams, axis=-2)
    tapped = jnp.zeros((len(taps), *x.shape), x.dtype) if taps else None

    def block(carry: Any, layer: Layer) -> Any:
        x, cache, tapped = carry
        mixer, memory = layer.kind
        at, own = layer.within(config.stack), layer.within(config.of(mixer))
        if memory is not None and config.ngram is not None:
            with jax.named_scope("ngram"):
                added, cache = ngram_memory(
                    x, p["ngram"], memory, cache, batch, config.ngram, config.eps, context
                )
                x = x + added
        with jax.named_scope("attention" if mixer == SPARSE else "gdn"):
            y, weights = collapse(x, p["attn_site"], at, config.eps, context, batch.rows)
            if mixer == SPARSE:
                mixed, cache = _sparse_attention(y, p, own, cache, batch, config, context)
            else:
                mixed, cache = gdn(y, p["gdn"], own, cache, own, batch, config.delta, context)
            x = add(x, mixed, weights)
        x, fed = _feed(x, p, at, batch, config, context)
        seen = {"mixer_out": mixed, "mlp_out": fed, "residual": x}
        return (x, cache, tap(tapped, taps, layer, x)), pick(seen, capture)

    first = pick({"embed": embedded}, capture)
    (x, cache, tapped), captured = run_layers(config.kinds, block, (x, cache, tapped))
    return Output(x, tapped, cache, first | captured)


def final(params: Any, residual: jax.Array, config: Config, context: Context) -> jax.Array:
    """The last mixer; there is no norm behind it."""
    return last_mix(residual, params["mixer"], config.eps, context)


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
    """The prediction layers `mtp.*`: sparse attention and experts between sites, no memory."""
    if not config.drafts:
        return {}
    hidden, embed, layers = config.hidden, Dim(config.hidden, "embed"), config.draft_stack
    return {
        "fc_embedding": Param("mtp.fc_embedding.weight", (embed, Dim(hidden))),
        "fc_hidden": Param("mtp.fc_hidden.weight", (embed, Dim(hidden))),
        "embedding_norm": Param("mtp.pre_fc_norm_embedding.weight", (embed,), init="zeros"),
        "hidden_norm": Param(
            "mtp.pre_fc_norm_hidden.weight", (Dim(config.streams * hidden),), init="zeros"
        ),
        "layers": _declare_layers(config, layers, layers, "mtp.layers.{layer}", ranks),
        "mixer": declare_site(
            config.streams,
            hidden,
            config.site_rank,
            None,
            "mtp.hyper_connection_mixer",
            inject=False,
        ),
    }


def declare_draft_caches(config: Config, ranks: int) -> dict[str, caches.Declaration]:
    if not config.drafts:
        return {}
    planes = declare_kv(config.attention(ranks), config.draft_stack)
    planes = {f"draft_{name}": plane for name, plane in planes.items()}
    return planes | declare_block_keys(config.index, config.draft_stack, "draft_")


def draft(
    params: Any,
    cache: caches.Caches,
    batch: Batch,
    hidden: jax.Array,
    config: Config,
    context: Context,
    depth: int = 0,
) -> tuple[jax.Array, jax.Array, caches.Caches]:
    """R_i = fc_embedding(norm(embed(next token))) + fc_hidden(norm(hidden)_i), one layer, mixer.

    The norm of the hidden state is one over all streams together.

    Args:
      batch: its tokens are those that follow the ones of `hidden`.
      hidden: [B, Q, N, H], the streams after the last layer, or what depth - 1 carried.
      depth: which prediction layer; they take turns.

    Returns:
      float32 logits [B, Q, vocab], the carry for the next depth [B, Q, N, H], and the caches.
    """
    d = params["draft"]
    p, at = d["layers"], depth % config.drafts

    def through(value: jax.Array, name: str) -> jax.Array:
        return linear(value, d[name], context=context)

    e = embed_tokens(params["embed"], batch, context)
    e = rms_norm(e, d["embedding_norm"], eps=config.eps, zero_centred=True)
    wide = hidden.astype(e.dtype).reshape(*e.shape[:-1], -1)
    wide = rms_norm(wide, d["hidden_norm"], eps=config.eps, zero_centred=True)
    streams = wide.reshape(*e.shape[:-1], config.streams, config.hidden)
    x = through(e, "fc_embedding")[..., None, :] + through(streams, "fc_hidden")
    with jax.named_scope("attention"):
        y, weights = collapse(x, p["attn_site"], at, config.eps, context, batch.rows)
        mixed, cache = _sparse_attention(y, p, at, cache, batch, config, context, "draft_")
        x = add(x, mixed, weights)
    x, _ = _feed(x, p, at, batch, config, context)
    h = last_mix(x, d["mixer"], config.eps, context)
    head = params.get("head", params["embed"])
    return vocabulary_logits(h, head, config.vocab, context), x, cache
