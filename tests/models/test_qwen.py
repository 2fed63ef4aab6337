"""What only Qwen's hybrid families have: n-gram tables, block-sparse attention, their configs."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparkjax.kernels.attention.reference import attend
from sparkjax.kernels.sparse_gqa.reference import sparse_attention
from sparkjax.mesh.context import Context
from sparkjax.models import cache as caches
from sparkjax.models import params, qwen3_5, qwen3_5_moe, qwen4_exp, tables
from sparkjax.models.batch import Batch
from sparkjax.models.config import UnsupportedConfig
from sparkjax.models.layers.block_indexer import BlockIndex, declare_block_keys, select_blocks
from sparkjax.models.layers.ngram import NGram, hash_rows
from sparkjax.models.layers.rope import Rope
from sparkjax.weights.errors import CheckpointError

GOLDEN = Path(__file__).resolve().parent.parent / "golden"

# --- N-gram tables ------------------------------------------------------------------------------


def ngram(**changes):
    fields = {
        "size": 3, "heads": 4, "width": 64, "base": 60, "divisor": 16, "vocab": 384, "seed": 1234,
        "end": 9, "taps": 4,
    }  # fmt: skip
    return NGram(**(fields | changes))


def test_the_release_has_these_multipliers_and_primes():
    release = ngram(heads=8, vocab=248320, base=20_000_000, divisor=128, width=2560)
    assert list(release.multipliers(0)) == [23703573157769, 20109073645365, 8052911324071]
    primes = release.primes(0)
    assert len(primes) == 16 and primes[0] >= 20_000_000 and (np.diff(primes) > 0).all()
    assert release.row == 160
    # A second memory numbers its primes on.
    assert release.primes(1)[0] > primes[-1]


def plain_rows(tokens, t, n):
    """The definition, one position at a time, in Python's integers."""
    m = [int(v) for v in n.multipliers(0)]
    sizes, offsets = n.primes(0), n.offsets(0)
    out, mix = [], int(tokens[t]) * m[0]
    for s in range(1, n.size):
        crossed = t - s < 0 or any(int(x) == n.end for x in tokens[t - s : t])
        mix ^= (n.end if crossed else int(tokens[t - s])) * m[s]
        for head in range((s - 1) * n.heads, s * n.heads):
            out.append(mix % int(sizes[head]) + int(offsets[head]))
    return out


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("pieces", [(20,), (1,) * 20, (3, 1, 9, 7)])
def test_hashing_equals_its_definition_in_any_pieces(size, pieces):
    n = ngram(size=size)
    rng = np.random.default_rng(size)
    tokens = rng.integers(0, n.vocab, 20)
    tokens[[0, 5, 6, 12]] = n.end
    parts = (n.multipliers(0), n.primes(0), n.offsets(0))
    found, start = [], 0
    for count in pieces:
        found.append(hash_rows(tokens, start, count, n, *parts))
        start += count
    expected = [plain_rows(tokens, t, n) for t in range(20)]
    assert np.concatenate(found).tolist() == expected
    assert np.concatenate(found).max() < n.rows(0)


class Files:
    path = "here"

    def __init__(self, **arrays):
        self.arrays, self.names = arrays, frozenset(arrays)

    def read(self, name):
        return self.arrays[name]


def test_rows_come_from_uneven_shards_with_their_scales():
    rng = np.random.default_rng(0)
    whole = rng.normal(size=(10, 6)).astype(np.float32)
    scales = rng.normal(size=(10, 3)).astype(np.float32)
    cut = {f"t{i}": part for i, part in enumerate(np.split(whole, [4, 8]))}
    declared = {"t": tables.Table("t{shard}", (10, 6), scale=("s",))}
    ids = np.array([[9, 0, 4], [3, 3, 8]])
    opened = tables.open_tables(declared, Files(**cut, s=scales), lambda: None)
    expected = whole[ids] * np.repeat(scales[ids], 2, axis=-1)
    np.testing.assert_array_equal(opened["t"].take(ids), expected)
    opened = tables.open_tables(declared, Files(**cut, s=np.array([0.5], np.float32)), lambda: None)
    np.testing.assert_array_equal(opened["t"].take(ids), whole[ids] * np.float32(0.5))
    assert tables.tensors(declared, Files(**cut)) == ["t0", "t1", "t2"]


def test_a_table_of_another_shape_or_a_missing_one_is_named():
    declared = {"t": tables.Table("t{shard}", (10, 6))}
    with pytest.raises(CheckpointError, match=r"\[4, 6\].*\[10, 6\]"):
        tables.open_tables(declared, Files(t0=np.zeros((4, 6))), lambda: None)
    with pytest.raises(CheckpointError, match="missing tensor: t"):
        tables.open_tables(declared, Files(), lambda: None)


# --- Sparse attention ---------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 9])
def test_attention_to_chosen_rows_equals_masked_attention(count):
    rng = np.random.default_rng(count)
    pages, size, kv, heads, dim, values = 5, 8, 2, 6, 4, 3
    k = jnp.asarray(rng.normal(size=(2, pages, size, kv, dim)), jnp.float32)
    v = jnp.asarray(rng.normal(size=(2, pages, size, kv, values)), jnp.float32)
    q = jnp.asarray(rng.normal(size=(2, count, heads, dim)), jnp.float32)
    table = jnp.array([[3, 0, 4], [1, 2, 0]], jnp.int32)
    chosen = rng.permuted(np.tile(np.arange(3 * size), (2, count, 1)), axis=-1)[..., :7]
    chosen[0, 0] = -1
    chosen[1, :, ::2] = -1
    seen = (chosen[..., None] == np.arange(3 * size)).any(-2)
    rows = [plane[1, table].reshape(2, 3 * size, kv, -1) for plane in (k, v)]
    expected = attend(q, *rows, jnp.asarray(seen), scale=0.5)
    found = jax.jit(sparse_attention, static_argnames="scale")(
        q, k, v, 1, table, jnp.asarray(chosen), scale=0.5
    )
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert not np.any(found[0, 0])


def plain_selection(x, p, index, rope):
    """Blocks of every query by the definition, in float64."""
    n, dim = len(x), index.dim
    both = (x @ p["qk"].T).reshape(n, -1, dim)

    def norm(y, w):
        return y / np.sqrt((y * y).mean(-1, keepdims=True) + index.eps) * (1 + w)

    def turn(y, position):
        half = rope.dim // 2
        angle = position * rope.frequencies().astype(np.float64)
        a, b = y[..., :half], y[..., half : 2 * half]
        turned = [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)]
        return np.concatenate([*turned, y[..., 2 * half :]], -1)

    raw, size, found = both[:, -1], index.ratio, []
    for t in range(n):
        q = turn(norm(both[t, :-1], p["q_norm"]), t)
        blocks = (t + 1) // size
        keys = [
            turn(norm(raw[b * size : (b + 1) * size].mean(0), p["k_norm"]), b * size)
            for b in range(blocks)
        ]
        scores = [np.maximum(q @ key, 0).sum() / np.sqrt(dim) for key in keys]
        found.append((scores, set(range(blocks * size, t + 1))))
    return found


@pytest.mark.parametrize("ratio", [1, 3, 4])
@pytest.mark.parametrize("pieces", [(41,), (5, 1, 1, 2, 17, 15)])
def test_a_selection_differs_from_the_best_only_within_rounding(ratio, pieces):
    index = BlockIndex(heads=3, dim=8, budget=4 * ratio, ratio=ratio, eps=1e-6)
    rope = Rope(4, 100.0)
    rng = np.random.default_rng(ratio)
    tokens, hidden, size = 41, 10, 12
    x = rng.normal(size=(tokens, hidden))
    p = {"qk": rng.normal(size=((index.heads + 1) * index.dim, hidden))}
    p |= {name: 0.3 * rng.normal(size=index.dim) for name in ("q_norm", "k_norm")}
    stacked = {name: jnp.asarray(w, jnp.float32)[None] for name, w in p.items()}
    sizes = caches.Sizes(8, size, slots=1)
    cache = caches.allocate(declare_block_keys(index, (0,)), sizes, "float32")
    step = jax.jit(select_blocks, static_argnames=("at", "slot", "index", "rope", "context"))
    found, start = [], 0
    for count in pieces:
        batch = Batch(
            tokens=jnp.zeros((1, count), jnp.int32),
            start=jnp.array([start], jnp.int32),
            lengths=jnp.array([count], jnp.int32),
            pages=jnp.array([[5, 0, 3, 7]], jnp.int32),
            slots=jnp.zeros((1,), jnp.int32),
        )
        chosen, cache = step(
            jnp.asarray(x[None, start : start + count], jnp.float32), stacked, at=0, cache=cache,
            slot=0, batch=batch, index=index, rope=rope, context=Context(),
        )  # fmt: skip
        found += [set(row[row >= 0].tolist()) for row in np.asarray(chosen[0])]
        start += count
    for t, (scores, tail) in enumerate(plain_selection(x, p, index, rope)):
        blocks = {token // ratio for token in found[t] - tail}
        assert tail <= found[t]
        assert found[t] - tail == {b * ratio + i for b in blocks for i in range(ratio)}
        assert len(blocks) == min(4, len(scores))
        left = [s for b, s in enumerate(scores) if b not in blocks]
        if left:
            assert min(scores[b] for b in blocks) > max(left) - 1e-5
            # Equal scores, exact zeros above all, go to the earlier block.
            zeros = [b for b, s in enumerate(scores) if s == 0]
            kept = [b for b in zeros if b in blocks]
            assert kept == zeros[: len(kept)]


# --- Configs ------------------------------------------------------------------------------------


def config(family, **changes):
    values = json.loads((GOLDEN / family / "config.json").read_text())
    values["text_config"].update(changes)
    return values


def test_the_outer_config_decides_whether_the_head_is_the_embedding():
    values = config("qwen3_5", tie_word_embeddings=False)
    values["tie_word_embeddings"] = True
    assert "head" not in qwen3_5.declare(qwen3_5.read_config(values), 1)
    flat = config("qwen3_5", tie_word_embeddings=True)["text_config"]
    assert qwen3_5.read_config(flat).tied


def test_old_and_new_layer_names_mean_the_same():
    names = ["linear_attention", "full_attention", "mamba", "attention", "qwen_sparse_attention"]
    read = qwen4_exp.read_config(config("qwen4_exp", layer_types=names, ple_layer_ids=[1]))
    assert read.of(qwen4_exp.SPARSE) == (1, 3, 4)
    values = config("qwen3_5", num_hidden_layers=6)
    del values["text_config"]["layer_types"]
    assert qwen3_5.read_config(values).of(qwen3_5.FULL) == (3,)


def test_text_only_names_are_accepted():
    tree = qwen4_exp.declare(qwen4_exp.read_config(config("qwen4_exp")), 1)
    for _, param in params.leaves(tree):
        if param.name.startswith("model.language_model."):
            assert param.name.replace("language_model.", "", 1) in param.also


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        (qwen3_5, "hidden_act", "gelu"),
        (qwen3_5, "layer_types", ["linear_attention"]),
        (qwen3_5, "linear_num_value_heads", 5),
        (qwen3_5_moe, "norm_topk_prob", False),
        (qwen3_5_moe, "num_experts_per_tok", 9),
        (qwen4_exp, "hc_count", 1),
        (qwen4_exp, "output_gate_type", "tanh"),
        (qwen4_exp, "ple_layer_ids", [3]),
        (qwen4_exp, "ple_embed_dim", 60),
        (qwen4_exp, "indexer_kv_heads", 2),
        (qwen4_exp, "indexer_budget", 25),
        (qwen4_exp, "indexer_head_dim", 4),
        (qwen4_exp, "eos_token_id", None),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(family, field, value):
    name = family.__name__.rsplit(".", 1)[-1]
    with pytest.raises(UnsupportedConfig, match=field):
        family.read_config(config(name, **{field: value}))
