"""Engram (DeepSeek-V4.1): rows of a hashed n-gram table, gated into every residual stream.

On the host (`engram_prelude`), in int64. A token becomes a class c_t: tokens whose normalised
spellings are equal share one (`token_classes`). Before the start of the sequence stands the class
of the padding token. With four multipliers m of the layer, for n = 2 .. `size`, `heads` columns
each, every column with a prime P of its own:

    row = (xor_{s < n} c_{t-s} m_s) mod P + the column's first row

On the device (`engram_memory`), with e the joined rows of a token and streams X_1 .. X_N:

    [k_1 .. k_N | v] = W_kv e
    a_i  = <rms(X_i) q_i, rms(k_i) w_i> / sqrt(H),  float32
    X_i += sigmoid(sign(a_i) sqrt(max(|a_i|, 1e-6))) v
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...kernels.linear import linear
from ...mesh.context import Context
from ...weights.errors import CheckpointError
from ..batch import Batch
from ..config import ConfigReader
from ..params import Dim, Param
from ..tables import Derived, Table, Tables
from .ngram import primes_from
from .norm import rms

LONE_BLANK = "\ue000"
"""Stands for a text that is one blank, which stripping would remove."""


@dataclasses.dataclass(frozen=True)
class Engram:
    """The n-gram memories of a model.

    Attributes:
      layers: which layers have one in front of them.
      size: the longest n-gram.
      heads: columns of every length.
      dim: channels of a row.
      base: the least number of rows of a column.
      rows: of each memory's table.
      classes: how many classes the tokens fall into.
      pad: the token in front of the sequence.
      vocab: how many token ids there are.
    """

    layers: tuple[int, ...]
    size: int
    heads: int
    dim: int
    base: int
    rows: tuple[int, ...]
    classes: int
    pad: int
    vocab: int

    @property
    def columns(self) -> int:
        return (self.size - 1) * self.heads

    @property
    def width(self) -> int:
        """Channels of a token's rows together."""
        return self.columns * self.dim

    def primes(self, which: int) -> np.ndarray:
        """int64 [columns]: of memory number `which`. The search starts again for every length and
        layer and skips what is taken, so they are successive primes across all memories."""
        taken = primes_from(self.base, (which + 1) * self.columns)
        return np.array(taken[-self.columns :], np.int64)

    def multipliers(self, which: int) -> np.ndarray:
        """int64 [size]: odd, and small enough that a class times one fits 63 bits."""
        rng = np.random.default_rng(10007 * self.layers[which])
        half = max((2**63 - 1) // self.classes // 2, 1)
        return 2 * rng.integers(0, half, size=self.size, dtype=np.int64) + 1


def read_engram(r: ConfigReader, layers: int) -> Engram | None:
    """The `engram_*` fields; None where no layer has a memory."""
    ids = r.read("engram_layer_ids", list, [])
    if not ids:
        return None
    if sorted(set(ids)) != ids or not 0 <= ids[0] <= ids[-1] < layers:
        raise r.refuse("engram_layer_ids", ids, f"rising layer numbers below {layers}")
    size, heads = r.read("engram_max_ngram_size", int), r.read("engram_n_heads", int)
    if size < 2 or heads < 1:
        raise r.refuse("engram_max_ngram_size", size, "2 or more, with engram_n_heads 1 or more")
    engram = Engram(
        layers=tuple(ids),
        size=size,
        heads=heads,
        dim=r.read("engram_head_dim", int),
        base=r.read("engram_vocab_size", int),
        rows=(),
        classes=r.read("engram_compressed_vocab_size", int),
        pad=r.read("engram_pad_token_id", int, least=0),
        vocab=r.read("vocab_size", int),
    )
    needed = [int(engram.primes(which).sum()) for which in range(len(ids))]
    rows = r.read("engram_num_embeddings", list, needed)
    if len(rows) != len(ids) or any(have < need for have, need in zip(rows, needed, strict=True)):
        raise r.refuse("engram_num_embeddings", rows, f"at least {needed}")
    return dataclasses.replace(engram, rows=tuple(rows))


# --- On the host --------------------------------------------------------------------------------


def declare_engram_tables(engram: Engram, prefix: str) -> dict[str, Table | Derived]:
    """The tables under `prefix` (with `{layer}`), and the class of every token."""
    tables: dict[str, Table | Derived] = {
        "engram_classes": Derived(lambda tokenizer: token_classes(tokenizer, engram))
    }
    for which, (layer, rows) in enumerate(zip(engram.layers, engram.rows, strict=True)):
        where = prefix.format(layer=layer)
        shape, scale = (rows, engram.dim), (f"{where}.embed.scale",)
        tables[f"engram_{which}"] = Table(f"{where}.embed.weight", shape, scale=scale)
    return tables


def token_classes(tokenizer: Any, engram: Engram) -> np.ndarray:
    """int64 [vocab]: the class of every token id, numbered by first appearance.

    Two tokens are equal when their texts are, after NFKC, NFD, without accents, in lower case,
    with runs of blanks as one and none at the ends. A token that is part of a character only
    equals its own spelling. Ids that the tokenizer does not have count as padding.

    Args:
      tokenizer: None (a model with random weights) deals classes out in turn.
    """
    if tokenizer is None:
        return np.arange(engram.vocab, dtype=np.int64) % engram.classes
    from tokenizers import Regex, normalizers

    normal = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), LONE_BLANK),
            normalizers.Strip(),
            normalizers.Replace(LONE_BLANK, " "),
        ]
    )
    seen: dict[str, int] = {}
    found = []
    for token in range(min(tokenizer.vocab_size, engram.vocab)):
        text = tokenizer.decode([token], skip_special=False)
        if "\ufffd" in text:
            key = tokenizer.vocabulary.tokens[token] or text
        else:
            key = normal.normalize_str(text) or text
        found.append(seen.setdefault(key, len(seen)))
    if len(seen) != engram.classes:
        raise CheckpointError(
            f"the tokenizer's tokens fall into {len(seen)} classes; "
            f"config.json: engram_compressed_vocab_size is {engram.classes}"
        )
    found += [found[engram.pad]] * (engram.vocab - len(found))
    return np.array(found, np.int64)


def engram_rows(
    engram: Engram, which: int, classes: np.ndarray, tokens: np.ndarray, start: int, count: int
) -> np.ndarray:
    """int64 [count, columns]: the table rows of positions start .. start + count - 1.

    Args:
      classes: of every token id.
      tokens: int [at least start + count]; only the last size - 1 before `start` are looked at.
    """
    back = min(start, engram.size - 1)
    front = np.full(engram.size - 1 - back, classes[engram.pad], np.int64)
    c = np.concatenate([front, classes[np.asarray(tokens[start - back : start + count])]])
    here = engram.size - 1 + np.arange(count)
    multipliers, primes = engram.multipliers(which), engram.primes(which)
    offsets = np.cumsum(primes) - primes
    mix, found = c[here] * multipliers[0], []
    for s in range(1, engram.size):
        mix = mix ^ (c[here - s] * multipliers[s])
        own = slice((s - 1) * engram.heads, s * engram.heads)
        found.append(mix[:, None] % primes[own] + offsets[own])
    return np.concatenate(found, axis=1)


def engram_prelude(
    engram: Engram, opened: Tables, tokens: np.ndarray, start: int, count: int
) -> dict[str, np.ndarray]:
    """float32 [count, width] for every memory, by name."""
    out = {}
    for which in range(len(engram.layers)):
        rows = engram_rows(engram, which, opened["engram_classes"], tokens, start, count)
        out[f"engram_{which}"] = opened[f"engram_{which}"].take(rows).reshape(count, -1)
    return out


# --- On the device ------------------------------------------------------------------------------


def declare_engram(engram: Engram, streams: int, hidden: int, prefix: str) -> dict[str, Param]:
    """Parameters under `prefix` (with `{layer}`); every rank holds all of them."""
    into, each = Dim(engram.width), (Dim(streams), Dim(hidden, "embed"))
    return {
        "kv": Param(f"{prefix}.wkv.weight", (Dim((streams + 1) * hidden), into), engram.layers),
        "query": Param(f"{prefix}.q_weight", each, engram.layers, dtype="float32", init="ones"),
        "key": Param(f"{prefix}.k_weight", each, engram.layers, dtype="float32", init="ones"),
    }


def engram_memory(
    streams: jax.Array, p: dict[str, Any], which: int, batch: Batch, eps: float, context: Context
) -> jax.Array:
    """What memory number `which` adds to the streams [B, Q, N, H]; nothing to an image's.

    Raises:
      ValueError: the batch comes without the host's rows.
    """
    name = f"engram_{which}"
    if batch.prelude is None or name not in batch.prelude:
        raise ValueError(f"this model needs batch.prelude[{name!r}]; see models.tables")
    e = batch.prelude[name].astype(streams.dtype)
    kv = linear(e, p["kv"], which, context=context, rows=batch.rows)
    kv = kv.reshape(*kv.shape[:-1], -1, streams.shape[-1])
    key, value = kv[..., :-1, :], kv[..., -1:, :]
    query = rms(streams, eps) * p["query"][which]
    a = jnp.sum(query * (rms(key, eps) * p["key"][which]), axis=-1) * streams.shape[-1] ** -0.5
    gate = jax.nn.sigmoid(jnp.sign(a) * jnp.sqrt(jnp.maximum(jnp.abs(a), 1e-6)))
    if batch.embedding_mask is not None:
        gate = jnp.where(batch.embedding_mask[..., None], 0, gate)
    return gate.astype(streams.dtype)[..., None] * value
