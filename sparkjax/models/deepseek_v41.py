"""deepseek_v41: DeepSeek-V4.1, whose layers share a few compressed caches and what their indexers
pick, with single-pass hyper-connections and n-gram memories.

Against deepseek_v4: a site collapses the streams with the weights of the site before it, so there
is no learned collapse at the end; only some layers own compressed entries and the others read
those of the latest one; an indexer's choice holds until the next indexer, and from one layer on
indexers look only inside blocks that this layer picked; query heads are not normalised; no experts
by token id; two layers add rows of an n-gram table, looked up on the host, to the streams.

The raw residual is [B, Q, N + 1, H]: the N streams and, behind them, their collapse by the last
site's weights, which the streams alone do not tell.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..mesh.context import Context
from . import cache as caches
from .batch import Batch
from .config import ConfigReader, text_section
from .deepseek_v4 import read_hyper
from .family import Output
from .layers.compress import (
    Compressor,
    compress,
    declare_compressor,
    declare_entries,
    store_entries,
    visible_entries,
)
from .layers.deepseek_moe import declare_moe, moe, read_experts
from .layers.engram import (
    Engram,
    declare_engram,
    declare_engram_tables,
    engram_memory,
    engram_prelude,
    read_engram,
)
from .layers.head import declare_vocabulary, embed_tokens, vocabulary_logits
from .layers.hyper import Hyper, collapse, declare_site, expand, site, spread_streams
from .layers.norm import rms_norm
from .layers.rope import Rope, angles, read_rope
from .layers.shared_indexer import (
    ANYWHERE,
    INSIDE,
    PICKS,
    Chosen,
    SharedIndex,
    declare_index_keys,
    declare_index_queries,
    index_keys,
    nothing_chosen,
    select_entries,
)
from .layers.shared_kv import SharedKV, declare_shared_kv, declare_window, latents, shared_kv
from .layers.shared_moe import Experts
from .layers.stack import Layer, pick, run_layers, tap
from .params import Dim, Param, Tree
from .tables import Derived, Table, Tables

WINDOW, READS, INDEXES, OWNS = "window", "reads", "indexes", "owns"
"""What a layer's attention does: its window only; entries and a choice of earlier layers; an
indexer of its own over an earlier layer's entries; entries and an indexer of its own."""
IGNORED = (
    "layers.*.ffn.gate.bias_vl",
    "mtp.",
    "vision.",
    "aligner.",
    "image_start",
    "image_end",
    "image_newline",
)
"""What image tokens need, and the drafter that releases keep beside the model."""


class Kind(NamedTuple):
    """What is static of a layer.

    Attributes:
      ratio: tokens an entry of the cache that it reads; 0: none.
      role: WINDOW, READS, INDEXES or OWNS.
      scope: where its indexer, or the one that it relies on, looks.
      memory: which n-gram memory comes before it.
    """

    ratio: int
    role: str
    scope: str
    memory: int | None


@dataclasses.dataclass(frozen=True)
class Config:
    vocab: int
    hidden: int
    kinds: tuple[Kind, ...]
    attention: SharedKV
    index: SharedIndex
    hyper: Hyper
    experts: Experts
    engram: Engram | None
    eps: float
    plain_rope: Rope
    entry_rope: Rope
    tied: bool
    max_positions: int
    eos: tuple[int, ...]

    @property
    def layers(self) -> int:
        return len(self.kinds)

    @property
    def stack(self) -> tuple[int, ...]:
        return tuple(range(self.layers))

    @property
    def ratios(self) -> tuple[int, ...]:
        """Of the caches of entries."""
        return tuple(sorted({kind.ratio for kind in self.kinds} - {0}))

    def of(self, *roles: str, ratio: int | None = None) -> tuple[int, ...]:
        return tuple(
            i
            for i, kind in enumerate(self.kinds)
            if kind.role in roles and ratio in (None, kind.ratio)
        )

    def compressor(self, ratio: int) -> Compressor:
        # Released in float32, and computed in it.
        return Compressor(self.attention.dim, ratio, self.eps, biased=False, dtype="float32")

    def owner(self, ratio: int) -> tuple[int, ...]:
        """For every layer the place of the entries that it reads among those of `ratio`."""
        owners = self.of(OWNS, ratio=ratio)
        return tuple(max(sum(o <= i for o in owners) - 1, 0) for i in self.stack)


def read_config(values: Mapping[str, Any]) -> Config:
    r = ConfigReader(text_section(values))
    r.require("hidden_act", ("silu",), "silu")
    for absent in ("attention_bias", "mlp_bias"):
        r.require(absent, (False,), False)
    r.require("num_key_value_heads", (1,), 1)
    r.require("num_nextn_predict_layers", (0,), 0)
    r.require("num_hash_layers", (0,), 0)
    dim, eps = r.read("head_dim", int, 512), r.read("rms_norm_eps", float, 1e-20)
    heads, groups = r.read("num_attention_heads", int), r.read("o_groups", int, 8, least=1)
    if groups < 1 or heads % groups:
        raise r.refuse("o_groups", groups, f"divisors of num_attention_heads {heads}")
    window = r.read("sliding_window", int, 128)
    if window < 2:
        raise r.refuse("sliding_window", window, "at least 2")
    rotary = r.read("qk_rope_head_dim", int, 64)
    index_dim = r.read("index_head_dim", int, 128)
    if rotary % 2 or not 0 < rotary <= min(dim, index_dim):
        raise r.refuse("qk_rope_head_dim", rotary, "even numbers up to head_dim and index_head_dim")
    layers = r.read("num_hidden_layers", int)
    engram = read_engram(r, layers)
    outer = ConfigReader(values).read("tie_word_embeddings", bool, None)
    # Only the frequencies are stretched: cos and sin are never scaled.
    entry_rope = dataclasses.replace(
        read_rope(r, rotary),
        theta=r.read("compress_rope_theta", float, 160000.0),
        attention_factor=1.0,
    )
    return Config(
        vocab=r.read("vocab_size", int),
        hidden=r.read("hidden_size", int),
        kinds=_read_kinds(r, layers, engram),
        attention=SharedKV(
            heads=heads,
            dim=dim,
            q_rank=r.read("q_lora_rank", int),
            window=window,
            groups=groups,
            o_rank=r.read("o_lora_rank", int, 1024),
            eps=eps,
            head_norm=False,
        ),
        index=SharedIndex(
            heads=r.read("index_n_heads", int, 32),
            dim=index_dim,
            top=r.read("index_topk", int, 512),
            blocks=r.read("candidate_topk_blocks", int, 0),
            size=r.read("candidate_block_size", int, 1),
            eps=eps,
        ),
        hyper=read_hyper(r, eps),
        experts=read_experts(r),
        engram=engram,
        eps=eps,
        plain_rope=Rope(rotary, r.read("rope_theta", float, 10000.0)),
        entry_rope=entry_rope,
        tied=r.read("tie_word_embeddings", bool, False) if outer is None else outer,
        max_positions=r.read("max_position_embeddings", int, 1048576),
        eos=r.tokens("eos_token_id"),
    )


def _read_kinds(r: ConfigReader, layers: int, engram: Engram | None) -> tuple[Kind, ...]:
    """What every layer is, from `compress_ratios` (entries past the last layer are the drafter's),
    `kv_source_layer_ids`, `index_source_layer_ids` and `candidate_source_layer_id`."""
    ratios = r.read("compress_ratios", list)
    if len(ratios) < layers or not all(isinstance(x, int) and x >= 0 for x in ratios):
        raise r.refuse("compress_ratios", ratios, f"{layers} numbers of tokens, 0 for none")
    ratios = ratios[:layers]
    owners = _layer_ids(r, "kv_source_layer_ids", ratios)
    indexers = _layer_ids(r, "index_source_layer_ids", ratios)
    if not set(owners) <= set(indexers):
        raise r.refuse("index_source_layer_ids", indexers, f"lists with all of {owners}")
    for layer, ratio in enumerate(ratios):
        before = [owner for owner in owners if owner <= layer]
        if ratio and (not before or ratios[before[-1]] != ratio):
            raise r.refuse("compress_ratios", ratios, "the ratio of the last of kv_source_layer_ids")
    source = r.read("candidate_source_layer_id", int, None)
    if source is not None and (source not in indexers or owners[-1] > source):
        raise r.refuse(
            "candidate_source_layer_id", source, "one of index_source_layer_ids, none of "
            "kv_source_layer_ids behind it",
        )  # fmt: skip
    if source is not None:
        for key in ("candidate_topk_blocks", "candidate_block_size"):
            if r.read(key, int) < 1:
                raise r.refuse(key, r.read(key, int), "1 or more")
    kinds, scope = [], ANYWHERE
    for layer, ratio in enumerate(ratios):
        role = OWNS if layer in owners else INDEXES if layer in indexers else READS if ratio else WINDOW
        if source is not None and layer in indexers and layer >= source:
            scope = PICKS if layer == source else INSIDE
        memory = None
        if engram is not None and layer in engram.layers:
            memory = engram.layers.index(layer)
        kinds.append(Kind(ratio, role, scope, memory))
    return tuple(kinds)


def _layer_ids(r: ConfigReader, key: str, ratios: list[int]) -> list[int]:
    """Rising numbers of layers with a ratio."""
    ids = r.read(key, list)
    ids = [i for i in ids if i < len(ratios)]
    if sorted(set(ids)) != ids or not all(i >= 0 and ratios[i] for i in ids):
        raise r.refuse(key, ids, "rising numbers of layers whose entry in compress_ratios is not 0")
    return ids


# --- Declarations -------------------------------------------------------------------------------


def _norm(name: str, config: Config, layers: tuple[int, ...] | None = None) -> Param:
    return Param(name, (Dim(config.hidden, "embed"),), layers, dtype="float32", init="ones")


def declare(config: Config, ranks: int) -> Tree:
    hidden, prefix, stack = config.hidden, "layers.{layer}", config.stack
    attn = f"{prefix}.attn"
    layers: Tree = {
        "attention_norm": _norm(f"{prefix}.attn_norm.weight", config, stack),
        "attention": declare_shared_kv(config.attention, hidden, stack, attn, ranks),
        "attention_site": declare_site(config.hyper, hidden, stack, f"{prefix}.hc_attn"),
        "moe_norm": _norm(f"{prefix}.ffn_norm.weight", config, stack),
        "moe": declare_moe(config.experts, hidden, stack, f"{prefix}.ffn", ranks),
        "moe_site": declare_site(config.hyper, hidden, stack, f"{prefix}.hc_ffn"),
    }
    for ratio in config.ratios:
        owners = config.of(OWNS, ratio=ratio)
        layers[f"entries_{ratio}"] = declare_compressor(
            config.compressor(ratio), hidden, owners, f"{attn}.compressor"
        )
    if config.ratios:
        index, shape, where = config.index, config.attention, f"{attn}.indexer"
        indexers = config.of(OWNS, INDEXES)
        layers["indexer"] = {
            "keys": declare_index_keys(index, shape.dim, config.of(OWNS), where),
            "queries": declare_index_queries(index, hidden, shape.q_rank, indexers, where),
        }
    if config.engram is not None:
        where = f"{prefix}.engram"
        layers["engram"] = declare_engram(config.engram, config.hyper.streams, hidden, where)
    tree: Tree = {
        "embed": declare_vocabulary(config.vocab, hidden, "embed.weight", ranks),
        "layers": layers,
        "norm": _norm("norm.weight", config),
    }
    if not config.tied:
        tree["head"] = declare_vocabulary(config.vocab, hidden, "head.weight", ranks)
    return tree


def declare_caches(config: Config, ranks: int) -> dict[str, caches.Declaration]:
    planes: dict[str, caches.Declaration] = {"window": declare_window(config.attention, config.stack)}
    for ratio in config.ratios:
        owners = config.of(OWNS, ratio=ratio)
        name = f"entries_{ratio}"
        planes |= declare_entries(config.compressor(ratio), owners, name, config.index.top)
        planes[f"index_{ratio}"] = caches.Paged(owners, (Dim(config.index.dim),), stride=ratio)
    return planes


def declare_tables(config: Config) -> dict[str, Table | Derived]:
    if config.engram is None:
        return {}
    return declare_engram_tables(config.engram, "layers.{layer}.engram")


def prelude_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    if config.engram is None:
        return {}
    return {f"engram_{which}": (config.engram.width,) for which in range(len(config.engram.layers))}


def prelude(
    config: Config, opened: Tables, tokens: np.ndarray, start: int, count: int
) -> dict[str, np.ndarray]:
    if config.engram is None:
        return {}
    return engram_prelude(config.engram, opened, tokens, start, count)


# --- The pass -----------------------------------------------------------------------------------


def _mix(
    y: jax.Array,
    p: Any,
    layer: Layer,
    cache: caches.Caches,
    chosen: Chosen,
    batch: Batch,
    config: Config,
    context: Context,
    ropes: Sequence[tuple[jax.Array, jax.Array]],
) -> tuple[jax.Array, caches.Caches, Chosen]:
    """The layer's attention over normalised y, and what later layers attend to."""
    at, (ratio, role, scope, _) = layer.within(config.stack), layer.kind
    latent, kv = latents(y, p["attention"], at, config.attention, batch, context)
    if role == WINDOW:
        mixed, cache = shared_kv(
            kv, latent, p["attention"], at, cache, "window", at, batch, config.attention, context, ropes[0]
        )
        return mixed, cache, chosen
    name, keys = f"entries_{ratio}", f"index_{ratio}"
    limit = visible_entries(batch, ratio)
    if role == OWNS:
        slot, c = layer.within(config.of(OWNS, ratio=ratio)), config.compressor(ratio)
        entries, cache = compress(y, p[name], slot, cache, name, slot, batch, c, context)
        cache = store_entries(entries, cache, name, slot, batch, ratio, config.entry_rope, context)
        own = layer.within(config.of(OWNS))
        key = index_keys(entries, p["indexer"]["keys"], own, config.index, context)
        cache = store_entries(key, cache, keys, slot, batch, ratio, config.entry_rope, context)
    else:
        slot = jnp.asarray(config.owner(ratio), jnp.int32)[layer.index]
    if role != READS:
        own = layer.within(config.of(OWNS, INDEXES))
        chosen = select_entries(
            y, latent, p["indexer"]["queries"], own, cache[keys], slot, limit, scope, chosen, batch,
            config.index, context, ropes[1],
        )  # fmt: skip
    picked = chosen.rows if config.index.chooses(cache[keys], batch, scope) else None
    mixed, cache = shared_kv(
        kv, latent, p["attention"], at, cache, "window", at, batch, config.attention, context, ropes[1],
        entries=cache[name], entries_at=slot, limit=limit, selected=picked,
    )  # fmt: skip
    return mixed, cache, chosen


def forward(
    params: Any,
    cache: caches.Caches,
    batch: Batch,
    config: Config,
    context: Context,
    taps: tuple[int, ...] = (),
    capture: Collection[str] = (),
) -> Output:
    """As every family's; "entering" may be captured too: the streams in front of every layer's
    first site, behind its memory."""
    p, layers, hyper = params["layers"], config.stack, config.hyper
    embedded = embed_tokens(params["embed"], batch, context)
    x = spread_streams(embedded, hyper)
    pre = jnp.zeros(x.shape[:-1], jnp.float32).at[..., 0].set(1)
    ropes = tuple(angles(rope, batch.positions) for rope in (config.plain_rope, config.entry_rope))
    tapped = jnp.zeros((len(taps), *x.shape), x.dtype) if taps else None

    def norm(x: jax.Array, name: str, at: Any) -> jax.Array:
        return rms_norm(x, p[name], at, eps=config.eps, late_cast=True)

    def block(carry: Any, layer: Layer) -> Any:
        x, pre, cache, chosen, tapped = carry
        at, memory = layer.within(layers), layer.kind.memory
        if memory is not None:
            with jax.named_scope("engram"):
                x = x + engram_memory(x, p["engram"], memory, batch, config.eps, context)
        entering = x
        with jax.named_scope(f"{layer.kind.role}_attention"):
            hc = site(x, p["attention_site"], at, hyper, context)
            y = norm(collapse(pre, x), "attention_norm", at)
            mixed, cache, chosen = _mix(y, p, layer, cache, chosen, batch, config, context, ropes)
            x, pre = expand(hc, mixed, x), hc.pre
        with jax.named_scope("moe"):
            hc = site(x, p["moe_site"], at, hyper, context)
            y = norm(collapse(pre, x), "moe_norm", at)
            fed = moe(y, p["moe"], at, config.experts, batch, context, bias_at=at)
            x, pre = expand(hc, fed, x), hc.pre
        seen = {"entering": entering, "mixer_out": mixed, "mlp_out": fed, "residual": x}
        return (x, pre, cache, chosen, tap(tapped, taps, layer, x)), pick(seen, capture)

    first = pick({"embed": embedded}, capture)
    reading = {(kind.ratio, kind.scope) for kind in config.kinds if kind.ratio}
    planes = ((cache[f"index_{ratio}"], scope) for ratio, scope in reading)
    carry = (x, pre, cache, nothing_chosen(planes, batch, config.index), tapped)
    (x, pre, cache, _, tapped), captured = run_layers(config.kinds, block, carry)
    x = jnp.concatenate([x, collapse(pre, x)[..., None, :]], axis=-2)
    return Output(x, tapped, cache, first | captured)


def final(params: Any, residual: jax.Array, config: Config, context: Context) -> jax.Array:
    return rms_norm(residual[..., -1, :], params["norm"], eps=config.eps, late_cast=True)


def logits(
    params: Any,
    residual: jax.Array,
    config: Config,
    context: Context,
    rows: jax.Array | None = None,
) -> jax.Array:
    x = final(params, residual, config, context)
    return vocabulary_logits(x, params.get("head", params["embed"]), config.vocab, context, rows)
