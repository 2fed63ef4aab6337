"""What the sampler must do, row by row in plain numpy, and how its inputs are made."""

from __future__ import annotations

import numpy as np

from sparkjax.engine.records import Sampling
from sparkjax.engine.sampler import P_SLACK, SamplingRows


def rows_of(samplings, vocab, positions=None, biases=4, mask=None) -> SamplingRows:
    """SamplingRows of a list of `Sampling`."""
    size = len(samplings)
    ids = np.full((size, biases), -1, np.int32)
    values = np.zeros((size, biases), np.float32)
    for b, s in enumerate(samplings):
        for n, (token, value) in enumerate(s.logit_bias):
            ids[b, n], values[b, n] = token, value

    def column(name, dtype=np.float32):
        return np.array([getattr(s, name) for s in samplings], dtype)

    if mask is None:
        mask = np.ones((size, vocab), bool)
    return SamplingRows(
        temperature=column("temperature"),
        top_k=column("top_k", np.int32),
        top_p=column("top_p"),
        min_p=column("min_p"),
        presence=column("presence_penalty"),
        frequency=column("frequency_penalty"),
        repetition=column("repetition_penalty"),
        seed=np.array([(s.seed >> 32, s.seed & 0xFFFFFFFF) for s in samplings], np.uint32),
        position=np.zeros(size, np.int32) if positions is None else np.array(positions, np.int32),
        logprobs=np.array([s.logprobs is not None for s in samplings]),
        bias_ids=ids,
        bias_values=values,
        mask=packed(mask),
    )


def packed(mask: np.ndarray) -> np.ndarray:
    """bool [B, V] -> uint32 [B, ceil(V / 32)], with the bits behind V set."""
    mask = np.pad(mask, ((0, 0), (0, -mask.shape[1] % 32)), constant_values=True)
    return np.packbits(mask, axis=1, bitorder="little").view("<u4")


def adjusted(logits, s: Sampling, counts, prompt, mask) -> np.ndarray:
    """float32 [V] after bias, penalties and mask."""
    x = logits.astype(np.float32).copy()
    for token, value in s.logit_bias:
        x[token] += np.float32(value)
    r = np.float32(s.repetition_penalty)
    seen = prompt | (counts > 0)
    x = np.where(seen, np.where(x > 0, x / r, x * r), x)
    x = x - np.float32(s.frequency_penalty) * counts.astype(np.float32)
    x = x - np.float32(s.presence_penalty) * (counts > 0)
    return np.where(mask, x, -np.inf).astype(np.float32)


def kept(x, s: Sampling) -> np.ndarray:
    """bool [V]: what the filters leave of adjusted logits, by sorting."""
    z = (x - x.max()) / np.float32(s.temperature)
    order = np.argsort(-z, kind="stable")
    mass = np.exp(z[order].astype(np.float64))
    n = min(s.top_k, len(x)) if s.top_k > 0 else len(x)
    if s.top_p < 1:
        target = np.float32(s.top_p) * mass[:n].sum() * P_SLACK
        n = min(n, int(np.searchsorted(np.cumsum(mass[:n]), target)) + 1)
    chosen = [t for t, m in zip(order[:n], mass[:n], strict=True) if m >= np.float32(s.min_p)]
    out = np.zeros(len(x), bool)
    out[chosen] = True
    return out & (z > -np.inf)


def probabilities(x, s: Sampling) -> np.ndarray:
    """float64 [V]: the exact distribution that is sampled."""
    z = (x.astype(np.float64) - x.max()) / s.temperature
    p = np.where(kept(x, s), np.exp(z), 0)
    return p / p.sum()


def log_softmax(logits) -> np.ndarray:
    x = logits.astype(np.float64)
    top = x.max(-1, keepdims=True)
    return x - top - np.log(np.exp(x - top).sum(-1, keepdims=True))
