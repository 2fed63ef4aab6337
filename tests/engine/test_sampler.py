"""The device sampler against plain numpy, exact distributions, and itself in other company."""

import dataclasses
import functools
import itertools

import jax
import jax.extend.random
import jax.numpy as jnp
import numpy as np
import pytest
import sampler_oracle as oracle
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkjax.engine import sampler
from sparkjax.engine.records import Sampling
from sparkjax.engine.sampler import TOP, SamplingRows, prompt_logprobs, sample
from sparkjax.kernels.row_sums import row_sum
from sparkjax.mesh.context import Context

run = jax.jit(sample)


def history(size, vocab):
    return np.zeros((size, vocab), np.int32), np.zeros((size, vocab), bool)


def draws(logits, sampling, count, mask=None, start=0):
    """Tokens of `count` positions, all from logits float32 [V], in few sizes of program."""
    if len(logits) < 64:
        logits = np.pad(logits, (0, 64 - len(logits)), constant_values=-np.inf)
    vocab = len(logits)
    size = 4000 if count > 1000 else 1000
    if count != size:
        parts = [draws(logits, sampling, size, mask, start + i) for i in range(0, count, size)]
        return np.concatenate(parts)[:count]
    rows = oracle.rows_of(
        [sampling] * count,
        vocab,
        positions=range(start, start + count),
        mask=None if mask is None else np.tile(mask, (count, 1)),
    )
    return np.asarray(run(np.tile(logits, (count, 1)), rows, *history(count, vocab)).token)


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 40, 1000]),
    top_p=st.sampled_from([1.0, 1.0, 1e-9, 0.1, 0.5, 0.9, 0.999]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
    presence_penalty=st.sampled_from([0.0, 0.0, -1.5, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.3, -0.2]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.5]),
    seed=st.integers(0, 2**64 - 1),
    logit_bias=st.lists(
        st.tuples(st.integers(0, 66), st.sampled_from([-100.0, -1.0, 2.0, 100.0])),
        max_size=4,
        unique_by=lambda pair: pair[0],
    ).map(tuple),
    logprobs=st.sampled_from([None, 0, 20]),
)


def case(vocab, seed, size):
    """Logits with many ties, counts, prompts and masks."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (size, vocab)).astype(np.float32)
    if seed % 2:
        logits = np.round(logits)
    counts = rng.poisson(0.5, (size, vocab)).astype(np.int32)
    prompt = rng.random((size, vocab)) < 0.2
    mask = rng.random((size, vocab)) < rng.choice([0.1, 0.5, 1.1], (size, 1))
    mask[np.arange(size), rng.integers(0, vocab, size)] = True
    return logits, counts, prompt, mask


@settings(max_examples=150, deadline=None)
@given(st.lists(samplings, min_size=4, max_size=4), st.integers(0, 2**32))
def test_against_plain_numpy(rows, seed):
    vocab = 67
    logits, counts, prompt, mask = case(vocab, seed, 4)
    positions = [seed % 1000 + b for b in range(4)]
    packed = oracle.rows_of(rows, vocab, positions, mask=mask)
    out = run(logits, packed, counts, prompt)
    noise = np.asarray(sampler._noise(packed, vocab))
    for b, s in enumerate(rows):
        x = oracle.adjusted(logits[b], s, counts[b], prompt[b], mask[b])
        if s.temperature == 0:
            expected = int(np.argmax(x))
        else:
            z = (x - x.max()) / np.float32(s.temperature)
            expected = int(np.argmax(np.where(oracle.kept(x, s), z + noise[b], -np.inf)))
        assert out.token[b] == expected
        logprobs = oracle.log_softmax(logits[b])
        np.testing.assert_allclose(out.logprob[b], logprobs[expected], atol=1e-5)
        if s.logprobs is None:
            assert (out.top_ids[b] == -1).all() and (out.top_logprobs[b] == -np.inf).all()
        else:
            order = np.argsort(-logits[b], kind="stable")[:TOP]
            np.testing.assert_array_equal(out.top_ids[b], order)
            np.testing.assert_allclose(out.top_logprobs[b], logprobs[order], atol=1e-5)


@pytest.mark.parametrize(
    ("vocab", "ties"),
    [
        (67, False),
        (67, True),
        (50_257, True),
        *(pytest.param(*p, marks=pytest.mark.slow) for p in itertools.product((7, 1000), (False, True))),
        pytest.param(50_257, False, marks=pytest.mark.slow),
    ],
)
def test_what_the_filters_keep(vocab, ties):
    """The kept set itself, at sizes up to a real vocabulary."""
    rng = np.random.default_rng(vocab)
    logits = rng.normal(0, 3, (60, vocab)).astype(np.float32)
    if ties:
        logits = np.round(logits)
    rows = [
        Sampling(
            temperature=float(rng.choice([0.2, 1, 3])),
            top_k=int(rng.choice([0, 1, 3, 50, vocab])),
            top_p=float(rng.choice([1, rng.random(), 0.999])),
            min_p=float(rng.choice([0, rng.random() ** 3])),
        )
        for _ in logits
    ]
    packed = jax.device_put(oracle.rows_of(rows, vocab))
    scaled = (logits - logits.max(1, keepdims=True)) / np.asarray(packed.temperature)[:, None]
    k = np.array([s.top_k or vocab for s in rows], np.int32)
    got = np.asarray(jax.jit(functools.partial(sampler._kept, context=Context()))(scaled, k, packed))
    for b, s in enumerate(rows):
        np.testing.assert_array_equal(got[b], oracle.kept(logits[b], s), err_msg=str(s))


def test_documented_choices_on_ties():
    def kept(**options):
        rows = oracle.rows_of([Sampling(temperature=1.0, **options)], 10)
        k = np.array([options.get("top_k") or 10], np.int32)
        return np.flatnonzero(sampler._kept(np.zeros((1, 10), np.float32), k, rows, Context())).tolist()

    assert kept(top_k=3) == [0, 1, 2]  # exactly k, lower ids first
    assert kept(top_p=0.1) == [0]  # not two, though float32 says 10 * 0.1 > 1
    assert kept(top_p=0.31) == [0, 1, 2, 3]  # the token that crosses p stays
    assert kept(top_k=5, top_p=0.4) == [0, 1]  # p of what top-k left
    assert kept(top_p=1e-30) == [0]
    assert kept(min_p=1.0) == list(range(10))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 4},
        {"top_p": 0.8},
        {"min_p": 0.2},
        {"top_k": 9, "top_p": 0.9, "min_p": 0.02},
        {"logit_bias": ((3, 2.0), (0, -100.0))},
    ],
    ids=str,
)
def test_frequencies_are_those_of_the_exact_distribution(options):
    logits = np.random.default_rng(1).normal(0, 1.5, 24).astype(np.float32)
    s = Sampling(**({"temperature": 1.0, "seed": 2**63 + 7} | options))
    x = oracle.adjusted(logits, s, np.zeros(24, np.int32), np.zeros(24, bool), np.ones(24, bool))
    expected = oracle.probabilities(x, s)
    count = 40_000
    seen = np.bincount(draws(logits, s, count), minlength=24)
    assert not seen[expected == 0].any()
    big = expected * count > 5
    observed = [*seen[big], seen[~big].sum()]
    wanted = [*expected[big] * count, expected[~big].sum() * count]
    if wanted[-1] == 0:
        observed, wanted = observed[:-1], wanted[:-1]
    assert scipy.stats.chisquare(observed, wanted).pvalue > 1e-3


def test_unlikely_tokens_are_as_unlikely_as_they_should_be():
    """A thousand tokens of 1e-6 each together take one draw in a thousand."""
    logits = np.full(1001, np.log(1e-6), np.float32)
    logits[0] = 0
    count = sum((draws(logits, Sampling(1.0, seed=n), 4000) != 0).sum() for n in range(10))
    assert 15 < count < 65  # 40 +- 4 sigma


def test_positions_seeds_and_tokens_are_independent():
    logits = np.zeros(2, np.float32)
    flips = np.stack([draws(logits, Sampling(1.0, seed=n), 2000) for n in (0, 1, 2**32)])
    assert (np.abs(np.corrcoef(flips)[~np.eye(3, dtype=bool)]) < 0.08).all()
    assert abs(np.corrcoef(flips[0][1:], flips[0][:-1])[0, 1]) < 0.08
    assert (np.abs(flips.mean(1) - 0.5) < 0.05).all()


def test_the_generator_is_threefry():
    rng = np.random.default_rng(0)
    key = rng.integers(0, 2**32, 2, dtype=np.uint32)
    counter = rng.integers(0, 2**32, 8, dtype=np.uint32)
    ours = sampler.threefry2x32(*(jnp.uint32(k) for k in key), counter[:4], counter[4:])
    theirs = jax.extend.random.threefry_2x32(jnp.asarray(key), jnp.asarray(counter))
    np.testing.assert_array_equal(np.concatenate(ours), theirs)


def test_the_draw_is_pinned():
    """A seed's tokens are a promise to clients: a change here is a change to them."""
    logits = np.random.default_rng(0).normal(0, 1, 3000).astype(np.float32)
    assert draws(logits, Sampling(1.0, seed=0x0123456789ABCDEF), 6).tolist() == PINNED


PINNED = [1584, 2868, 2613, 2143, 1584, 2552]


# Company.


def mixed(vocab):
    """Sixteen rows that use everything, and what each gets alone, at the sizes of a decode step."""
    size = 16
    logits, counts, prompt, mask = case(vocab, 2, size)
    mask[4:] = True
    some = [
        Sampling(),
        Sampling(logprobs=5),
        Sampling(1.0, seed=1),
        Sampling(1.0, top_p=0.9, seed=2),
        Sampling(0.7, top_k=20, min_p=0.01, seed=3, logprobs=0),
        Sampling(0.0, presence_penalty=1.0, frequency_penalty=0.1),
        Sampling(1.5, repetition_penalty=1.2, seed=4),
        Sampling(0.0, logit_bias=((3, 5.0), (6, 9.0))),
    ]
    rows = oracle.rows_of(some * 2, vocab, positions=range(100, 116), mask=mask)
    return logits, rows, counts, prompt


def take(inputs, order):
    logits, rows, counts, prompt = inputs
    rows = SamplingRows(**{f.name: getattr(rows, f.name)[order] for f in dataclasses.fields(rows)})
    return logits[order], rows, counts[order], prompt[order]


def same(a, b):
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(np.asarray(x).view(np.int32), np.asarray(y).view(np.int32))


def test_company_changes_no_bit():
    inputs = mixed(32_003)
    whole = run(*inputs)
    rng = np.random.default_rng(0)
    for size in (16, 3):
        for _ in range(16 // size):
            order = rng.permutation(16)[:size]
            same(run(*take(inputs, order)), [x[order] for x in whole])


def test_slots_say_where_the_history_is():
    logits, rows, counts, prompt = mixed(77)
    where = np.random.default_rng(0).permutation(20)[:16].astype(np.int32)
    spread = np.full((20, 77), 9, np.int32), np.ones((20, 77), bool)
    spread[0][where], spread[1][where] = counts, prompt
    same(run(logits, rows, *spread, where), run(logits, rows, counts, prompt))


def test_row_sum_order_depends_on_the_width_alone():
    x = np.random.default_rng(0).normal(0, 1, (16, 50_257)).astype(np.float32)
    total = jax.jit(functools.partial(row_sum, lambda x: x))
    whole = np.asarray(total(x))
    np.testing.assert_allclose(whole, x.astype(np.float64).sum(1), atol=2e-4)
    for size in (1, 2, 5):
        np.testing.assert_array_equal(total(x[3 : 3 + size]), whole[3 : 3 + size])
    for width in (1, 2, 63, 64, 65, 4097):
        np.testing.assert_allclose(total(x[:, :width]), x[:, :width].sum(1), atol=1e-3)


# Masks and broken input.


def test_a_mask_is_never_left():
    mask = np.zeros(64, bool)
    mask[[31, 32, 63]] = True
    logits = np.random.default_rng(0).normal(0, 9, 64).astype(np.float32)
    for s in (Sampling(), Sampling(1.0), Sampling(5.0, top_k=50, top_p=0.99, min_p=0.001)):
        assert set(draws(logits, s, 64, mask)) <= {31, 32, 63}
    assert set(draws(np.zeros(64, np.float32), Sampling(5.0), 64, mask)) == {31, 32, 63}


@pytest.mark.parametrize(
    "s", [Sampling(logprobs=20), Sampling(1.0, top_k=5, top_p=0.9, logprobs=0)]
)
def test_broken_logits_do_not_crash(s):
    broken = np.zeros((8, 40), np.float32)
    broken[0, :] = np.nan
    broken[1, 5] = np.nan
    broken[2, :] = -np.inf
    broken[3, 7] = np.inf
    broken[4, [7, 9]] = np.inf
    broken[5, 3] = 3.4e38
    broken[5, 4] = -3.4e38
    broken[6, 8] = 30
    out = run(broken, oracle.rows_of([s] * 8, 40), *history(8, 40))
    token = np.asarray(out.token)
    assert ((token >= 0) & (token < 40)).all()
    assert np.isnan(out.logprob[:2]).all()  # visible to the caller
    assert token[0] == 0 and token[1] != 5 and token[2] == 0
    assert token[3] == 7 and token[4] in (7, 9) and token[5] == 3 and token[6] == 8
    assert np.isfinite(out.logprob[6]) and np.isfinite(out.top_logprobs[6]).all()


def test_extreme_temperatures():
    logits = np.random.default_rng(0).normal(0, 30, 50).astype(np.float32)
    assert set(draws(logits, Sampling(1e-30), 8)) == {int(np.argmax(logits))}
    assert len(set(draws(logits, Sampling(1e30), 500).tolist())) == 50


def test_a_vocabulary_below_the_reported_tokens():
    logits = np.log(np.array([[1, 2, 3, 2]], np.float32) / 8)
    out = run(logits, oracle.rows_of([Sampling(logprobs=20)], 4), *history(1, 4))
    assert out.top_ids[0].tolist() == [2, 1, 3, 0] + [-1] * (TOP - 4)
    np.testing.assert_allclose(out.top_logprobs[0, :4], logits[0, [2, 1, 3, 0]], atol=1e-6)
    assert (out.top_logprobs[0, 4:] == -np.inf).all()


# Prompts.


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_prompt_logprobs(chunk):
    rng = np.random.default_rng(0)
    hidden = rng.normal(0, 1, (13, 6)).astype(np.float32)
    head = rng.normal(0, 1, (6, 101)).astype(np.float32)
    tokens = rng.integers(0, 101, 13).astype(np.int32)
    sizes = []

    def logits(rows):
        sizes.append(rows.shape)
        return rows @ head

    @jax.jit
    def score(hidden, tokens, wanted):
        return prompt_logprobs(logits, hidden, tokens, wanted, chunk)

    out = score(hidden, tokens, True)
    expected = oracle.log_softmax(hidden @ head)
    np.testing.assert_array_equal(out.token, tokens)
    np.testing.assert_allclose(out.logprob, expected[np.arange(13), tokens], atol=1e-5)
    order = np.argsort(-expected, axis=1, kind="stable")[:, :TOP]
    np.testing.assert_array_equal(out.top_ids, order)
    np.testing.assert_allclose(out.top_logprobs, np.take_along_axis(expected, order, 1), atol=1e-5)
    assert set(sizes) == {(min(chunk, 13), 6)}
    assert (score(hidden, tokens, False).top_ids == -1).all()


def test_prompt_logprobs_never_holds_all_logits():
    total, vocab = 512, 8192
    hidden = jax.ShapeDtypeStruct((total, 16), jnp.float32)
    head = jax.ShapeDtypeStruct((16, vocab), jnp.float32)
    tokens = jax.ShapeDtypeStruct((total,), jnp.int32)

    def score(hidden, tokens, head):
        return prompt_logprobs(lambda rows: rows @ head, hidden, tokens, chunk=32)

    stats = jax.jit(score).lower(hidden, tokens, head).compile().memory_analysis()
    assert stats.temp_size_in_bytes < total * vocab * 4 / 2
