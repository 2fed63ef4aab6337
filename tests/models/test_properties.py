"""What holds for every family, judged on the tiny checkpoints of tests/golden.

Every property is written once and runs over all families; those that are not in its DEFAULT set
are marked slow. `pytest tests/models -m "slow or not slow" -k NAME` runs everything of a family.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from driver import (
    DEPTH,
    GOLDEN,
    Feed,
    difference,
    driver,
    inexact,
    over,
    prompts,
    whole,
)

from sparkjax.mesh.context import Context
from sparkjax.model import Model
from sparkjax.models import cache as caches

CLOSE = 1e-5
"""||out - ref|| / ||ref|| where the same sums are taken in another order: matrix products of other
shapes, chunked against recurrent recurrences, one softmax over pages against one over a tile."""

KINDS = ("glm5_next", "deepseek_v4", "qwen4_exp", "flint")
"""Between them every kind of cache, recurrence, pool and selection; the same few programs serve
several properties."""
DEFAULT = {
    "pieces": KINDS,
    "decode": ("glm5_next", "qwen4_exp", "flint"),
    "company": KINDS,
    "snapshot": KINDS,
    "rollback": KINDS,
    "shards": ("glm5_next", "mimo_v2"),
    "gradient": ("llama",),
}


@over(DEFAULT["pieces"], 7, 16, 1)
def test_pieces_of_a_padded_tile_equal_one_shot(family: str, value: int):
    """Cuts in the middle of windows, pools, n-grams and convolution tails."""
    tokens = prompts(family)[0]
    d = driver(family)
    # What stands in the caches from earlier sequences is never read, be it not a number.
    out, _ = d.feed(d.caches(np.nan), tokens, 1, piece=value)
    assert difference(out, whole(family)) < CLOSE


@over(DEFAULT["decode"])
def test_one_token_steps_equal_prefill(family: str):
    tokens = prompts(family)[0]
    d = driver(family)
    out, cache = d.feed(d.caches(), tokens[:16], 2, piece=16)
    rest, _ = d.feed(cache, tokens, 2, start=16, piece=1, width=1)
    assert difference(np.concatenate([out, rest]), whole(family)) < CLOSE


@over(DEFAULT["company"])
def test_rows_of_other_lengths_do_not_matter(family: str):
    """Bit for bit: the same program, with other rows closed."""
    first, second = prompts(family)
    sequences = [first, second, np.concatenate([second[::-1], first[:30]])]
    d = driver(family)

    def run(rows: list[int]) -> dict[int, list[np.ndarray]]:
        cache = d.caches()
        found: dict[int, list[np.ndarray]] = {r: [] for r in rows}
        at = dict.fromkeys(rows, 0)
        for step in range(5):
            feeds = []
            for r in rows:
                count = (16, 5, 11)[(r + step) % 3]
                feeds.append(Feed(sequences[r], at[r], count, (r + 1) % 4))
            out, cache = d.step(cache, feeds, 16)
            for r, f, logits in zip(rows, feeds, out, strict=True):
                found[r].append(logits)
                at[r] += f.count
                if at[r] + 16 > len(sequences[r]):
                    at[r] = 0  # a new sequence in the slot of the old one
        return found

    together = run([0, 1, 2])
    for row in range(3):
        alone = run([row])
        assert np.isfinite(np.concatenate(alone[row])).all()
        for out, ref in zip(together[row], alone[row], strict=True):
            assert np.array_equal(out, ref)


@over(DEFAULT["snapshot"])
def test_restored_sequences_were_never_interrupted(family: str):
    """Bit for bit, and in another slot too: the same programs on the same numbers."""
    first, second = prompts(family)
    d = driver(family)
    cut = 43
    _, cache = d.feed(d.caches(), first[:cut], 1, piece=16)
    saved = d.snapshot(cache, 1)
    straight, cache = d.feed(cache, first[:75], 1, start=cut, piece=16)
    # Other work in the same slot, over other pages.
    _, cache = d.feed(cache, second, 1, paged=3)
    cache = d.restore(cache, 1, saved)
    again, cache = d.feed(cache, first[:75], 1, start=cut, piece=16)
    assert np.array_equal(again, straight)
    moved = d.restore(cache, 2, saved)
    other, _ = d.feed(moved, first[:75], 2, start=cut, paged=1)
    assert np.array_equal(other, straight)


@over(DEFAULT["rollback"])
def test_taken_back_tokens_were_never_fed(family: str):
    """Verification rows: DEPTH + 1 tokens fed at once, of which any prefix is kept. Once more
    than the depth in a row, at cuts that fall into and between pools and windows."""
    tokens = prompts(family)[0]
    d = driver(family)
    wrong = (tokens + 7) % d.model.config.vocab
    cut = 30
    _, cache = d.feed(d.caches(), tokens[:cut], 1, piece=16)
    found, at = [], cut
    for kept in (1, 5, 2, 4, 3, 1, 1, 5, 3, 2, 4):
        draft = np.concatenate([tokens[: at + kept], wrong[at + kept : at + DEPTH + 1]])
        out, cache = d.step(cache, [Feed(draft, at, DEPTH + 1, 1)], DEPTH + 1)
        found.append(out[0][:kept])
        at += kept
    out, cache = d.feed(cache, tokens[:80], 1, start=at, piece=16)
    found.append(out)
    # Relative to the tokens fed plainly; verification is another program than prefill.
    assert difference(np.concatenate(found), whole(family)[cut:80]) < CLOSE


@over(DEFAULT["rollback"])
def test_one_token_steps_can_be_taken_back(family: str):
    tokens = prompts(family)[0]
    d = driver(family)
    wrong = (tokens + 7) % d.model.config.vocab
    cut = 45
    _, cache = d.feed(d.caches(), tokens[:cut], 1, piece=16)
    for back in (4, 3, 1):
        mixed = np.concatenate([tokens[:cut], wrong[cut : cut + back]])
        _, cache = d.feed(cache, mixed, 1, start=cut, piece=1, width=1)
    out, _ = d.feed(cache, tokens[:60], 1, start=cut, piece=1, width=1)
    assert difference(out, whole(family)[cut:60]) < CLOSE


@over(DEFAULT["shards"], 3, 2, 4)
def test_shards_equal_the_unsharded_model(family: str, value: int):
    """Sums over ranks run in another order, so 1e-5; all ranks hold the same bits."""
    tokens = prompts(family)[1]
    model = Model.load(GOLDEN / family, dtype="float32", ranks=value)
    pages = -(-len(tokens) // model.page)
    cache = model.new_caches(caches.Sizes(pages, model.page, slots=1))
    batch = model._row(tokens, 0, len(tokens), pages, pad=len(tokens))
    out, _ = model._tile(model.params, cache, batch, model.context, ())
    copies = [np.asarray(shard.data) for shard in out[0].addressable_shards]
    assert len(copies) == value
    for copy in copies[1:]:
        assert np.array_equal(copies[0], copy)
    reference = driver(family).model.forward(tokens).logits
    assert difference(copies[0][0], reference) < CLOSE


@over(DEFAULT["gradient"])
def test_log_probabilities_have_gradients(family: str):
    model = Model.load(GOLDEN / family, context=Context())
    tokens = prompts(family)[1]
    pages = -(-len(tokens) // model.page)
    cache = model.new_caches(caches.Sizes(pages, model.page, slots=1))
    batch = model._row(tokens, 0, len(tokens), pages, pad=len(tokens))
    weights, put = inexact({k: v for k, v in model.params.items() if k != "draft"})
    weights = [w.astype(jnp.float32) for w in weights]

    @jax.jit
    def objective(weights: Any, cache: Any, batch: Any) -> jax.Array:
        params = put(weights)
        out = model.family.forward(params, cache, batch, model.config, model.context)
        logits = model.family.logits(params, out.residual, model.config, model.context)[0]
        scores = jax.nn.log_softmax(logits[:-1])
        return jnp.take_along_axis(scores, jnp.asarray(tokens[1:, None]), -1).sum()

    gradients = jax.jit(jax.grad(objective))(weights, cache, batch)
    assert all(np.isfinite(np.asarray(g)).all() for g in gradients)
    # Correction biases and indexers choose and do not weigh; every other large tensor takes part.
    named = jax.tree_util.tree_leaves_with_path(put(gradients))
    silent = [
        jax.tree_util.keystr(path)
        for path, g in named
        if g.size > 4096 and not np.asarray(g).any() and "indexer" not in jax.tree_util.keystr(path)
    ]
    assert not silent
