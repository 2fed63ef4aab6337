"""DeepSeek-V4.1 as plainly as it can be written: one sequence, no caches, float64 numpy."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparkjax.models.layers.engram import engram_rows


def rms(x: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def rotate(x: np.ndarray, rope: Any, positions: np.ndarray, sign: int = 1) -> np.ndarray:
    """Turns pairs (2i, 2i + 1) of the last channels of x [T, ..., D]."""
    phase = sign * positions[:, None] * rope.frequencies().astype(np.float64)
    phase = phase.reshape(len(x), *(1,) * (x.ndim - 2), -1)
    tail = x[..., -rope.dim :]
    pair = (tail[..., 0::2] + 1j * tail[..., 1::2]) * np.exp(1j * phase)
    out = x.copy()
    out[..., -rope.dim :: 2], out[..., -rope.dim + 1 :: 2] = pair.real, pair.imag
    return out


def site(x: np.ndarray, p: Any, at: int, hyper: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    n, eps = hyper.streams, hyper.eps
    m = rms(x.reshape(len(x), -1), hyper.norm_eps) @ p["fn"][at].T
    base, scale = p["base"][at], p["scale"][at]
    pre = sigmoid(m[:, :n] * scale[0] + base[:n]) + eps
    post = 2 * sigmoid(m[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    c = np.exp((m[:, 2 * n :] * scale[2] + base[2 * n :]).reshape(-1, n, n))
    c = c / c.sum(-1, keepdims=True) + eps
    c = c / (c.sum(-2, keepdims=True) + eps)
    for _ in range(hyper.rounds - 1):
        c = c / (c.sum(-1, keepdims=True) + eps)
        c = c / (c.sum(-2, keepdims=True) + eps)
    return pre, post, c


def expert(x: np.ndarray, gate: Any, up: Any, down: Any, limit: float) -> np.ndarray:
    g, u = np.minimum(gate @ x, limit), np.clip(up @ x, -limit, limit)
    return down @ (g * sigmoid(g) * u)


class Reference:
    """The logits of a sequence, and the least gap of any selection on the way."""

    def __init__(self, model: Any):
        self.config, self.tables = model.config, model.tables
        as64 = lambda tree: {  # noqa: E731
            k: as64(v) if isinstance(v, dict) else np.asarray(v, np.float64)
            for k, v in tree.items()
        }
        self.params = as64(model.params)
        self.gap = np.inf

    def best(self, scores: np.ndarray, k: int) -> np.ndarray:
        """The k best of [n], ties to the lower index."""
        order = np.argsort(-scores, kind="stable")
        if len(order) > k:
            last, next_ = scores[order[k - 1]], scores[order[k]]
            # Two scores of exactly zero (no head fires) tie in any precision.
            if np.isfinite([last, next_]).all() and not last == next_ == 0:
                self.gap = min(self.gap, float(last - next_))
        return order[:k]

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        c, p, count = self.config, self.params["layers"], len(tokens)
        n = c.hyper.streams
        x = np.repeat(self.params["embed"][tokens][:, None], n, axis=1)
        pre = np.zeros((count, n))
        pre[:, 0] = 1
        norm = lambda x, name, at: rms(x, c.eps) * p[name][at]  # noqa: E731
        collapse = lambda pre, x: (pre[..., None] * x).sum(1)  # noqa: E731
        self.entries = self.keys = self.allowed = self.inside = None
        for at, kind in enumerate(c.kinds):
            if kind.memory is not None:
                x = x + self.memory(x, kind.memory, tokens)
            new, post, mix = site(x, p["attention_site"], at, c.hyper)
            y = self.attention(norm(collapse(pre, x), "attention_norm", at), at, kind)
            x = post[..., None] * y[:, None] + np.einsum("tij,tih->tjh", mix, x)
            pre, (new, post, mix) = new, site(x, p["moe_site"], at, c.hyper)
            y = self.moe(norm(collapse(pre, x), "moe_norm", at), at)
            x = post[..., None] * y[:, None] + np.einsum("tij,tih->tjh", mix, x)
            pre = new
        out = rms(collapse(pre, x), c.eps) * self.params["norm"]
        return out @ self.params.get("head", self.params["embed"])[: c.vocab].T

    def memory(self, x: np.ndarray, which: int, tokens: np.ndarray) -> np.ndarray:
        c, p = self.config, self.params["layers"]["engram"]
        rows = engram_rows(c.engram, which, self.tables["engram_classes"], tokens, 0, len(tokens))
        e = self.tables[f"engram_{which}"].take(rows).reshape(len(tokens), -1)
        kv = (e @ p["kv"][which].T).reshape(len(tokens), -1, c.hidden)
        key, value = kv[:, :-1], kv[:, -1]
        dots = rms(x, c.eps) * p["query"][which] * rms(key, c.eps) * p["key"][which]
        a = dots.sum(-1) * c.hidden**-0.5
        return sigmoid(np.sign(a) * np.sqrt(np.maximum(abs(a), 1e-6)))[..., None] * value[:, None]

    def moe(self, y: np.ndarray, at: int) -> np.ndarray:
        e, p = self.config.experts, self.params["layers"]["moe"]
        scores = np.sqrt(np.log1p(np.exp(y @ p["gate"][at].T)))
        out = np.zeros_like(y)
        for t, row in enumerate(y):
            ids = self.best(scores[t] + p["bias"][at], e.k)
            weights = scores[t, ids] / (scores[t, ids].sum() + 1e-20) * e.scale
            for i, w in zip(ids, weights, strict=True):
                one = (p["experts"][name][at, i] for name in ("gate", "up", "down"))
                out[t] += w * expert(row, *one, e.limit)
            shared = (p["shared"][name][at] for name in ("gate", "up", "down"))
            out[t] += expert(row, *shared, e.limit)
        return out

    def compress(self, y: np.ndarray, at: int, ratio: int) -> None:
        """The entries and index keys that layer `at` owns."""
        c = self.config
        p, slot = self.params["layers"][f"entries_{ratio}"], c.owner(ratio)[at]
        kv = y @ p["kv"][slot].T
        pools = len(y) // ratio
        if ratio > 1:
            kv = kv[: pools * ratio].reshape(pools, ratio, -1)
            gate = np.exp((y @ p["gate"][slot].T)[: pools * ratio].reshape(pools, ratio, -1))
            kv = (kv * gate / gate.sum(1, keepdims=True)).sum(1)
        latent = rms(kv, c.eps) * p["norm"][slot]
        own = c.of("owns").index(at)
        keys = self.params["layers"]["indexer"]["keys"]
        key = rms(latent @ keys["k"][own].T, c.index.eps) * keys["k_norm"][own]
        where = np.arange(pools) * ratio
        self.entries, self.keys = (rotate(z, c.entry_rope, where) for z in (latent, key))

    def select(self, y: np.ndarray, latent: np.ndarray, at: int, kind: Any) -> None:
        """bool [T, entries]: which each query may attend to, and which lie in picked blocks."""
        c, index = self.config, self.config.index
        p, own = self.params["layers"]["indexer"]["queries"], c.of("owns", "indexes").index(at)
        q = rotate((latent @ p["q_b"][own].T).reshape(len(y), index.heads, -1), c.entry_rope, np.arange(len(y)))
        weights = y @ p["weights"][own].T * index.scale
        scores = np.einsum("th,thn->tn", weights, np.maximum(np.einsum("thd,nd->thn", q, self.keys), 0))
        seen = np.arange(len(self.keys)) < ((np.arange(len(y)) + 1) // kind.ratio)[:, None]
        if kind.scope == "picks":
            self.inside = np.zeros_like(seen)
            for t in range(len(y)):
                masked = np.where(seen[t], scores[t], -np.inf)
                blocks = [masked[i : i + index.size].max() for i in range(0, len(masked), index.size)]
                if seen[t].any():
                    blocks[(seen[t].sum() - 1) // index.size] = np.inf
                for block in self.best(np.array(blocks), index.blocks):
                    self.inside[t, block * index.size : (block + 1) * index.size] = True
        elif kind.scope == "inside":
            seen &= self.inside
        self.allowed = np.zeros_like(seen)
        for t in range(len(y)):
            self.allowed[t, self.best(np.where(seen[t], scores[t], -np.inf), index.top)] = True
        self.allowed &= seen

    def attention(self, y: np.ndarray, at: int, kind: Any) -> np.ndarray:
        c, p, count = self.config.attention, self.params["layers"]["attention"], len(y)
        rope = self.config.entry_rope if kind.ratio else self.config.plain_rope
        t = np.arange(count)
        latent = rms(y @ p["q_a"][at].T, c.eps) * p["q_norm"][at]
        q = rotate((latent @ p["q_b"][at].T).reshape(count, c.heads, c.dim), rope, t)
        rows = rotate(rms(y @ p["kv"][at].T, c.eps) * p["kv_norm"][at], rope, t)
        mask = (t[None] <= t[:, None]) & (t[None] > t[:, None] - c.window)
        if kind.role == "owns":
            self.compress(y, at, kind.ratio)
        if kind.role in ("owns", "indexes"):
            self.select(y, latent, at, kind)
        if kind.ratio:
            rows, mask = np.concatenate([rows, self.entries]), np.concatenate([mask, self.allowed], 1)
        logits = np.einsum("thd,nd->htn", q, rows) * c.dim**-0.5
        weights = np.where(mask, np.exp(logits), 0)
        weights /= weights.sum(-1, keepdims=True) + np.exp(p["sinks"][at])[:, None, None]
        out = rotate(np.einsum("htn,nd->thd", weights, rows), rope, t, -1)
        grouped = out.reshape(count, c.groups, -1)
        low = np.einsum("tgk,grk->tgr", grouped, p["o_a"][at].reshape(c.groups, c.o_rank, -1))
        return low.reshape(count, -1) @ p["o_b"][at].T
