"""Masks over a vocabulary: uint32 [words], bit i % 32 of word i // 32 says whether id i may come."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


def words(vocab: int) -> int:
    """uint32 words of a mask over `vocab` ids."""
    return -(-vocab // 32)


def pack(which: np.ndarray) -> np.ndarray:
    """The mask of bool [V]."""
    padded = np.zeros(words(len(which)) * 32, bool)
    padded[: len(which)] = which
    return np.packbits(padded, bitorder="little").view(np.uint32)


def add(row: np.ndarray, tokens: Iterable[int]) -> None:
    """Allows more ids."""
    for token in tokens:
        row[token // 32] |= np.uint32(1 << token % 32)


def has(row: np.ndarray, tokens: int | np.ndarray) -> np.ndarray:
    """Whether an id, or each of an array of them, is allowed: bool of the same shape."""
    tokens = np.asarray(tokens)
    return (row[tokens // 32] >> (tokens % 32).astype(np.uint32) & 1).astype(bool)


def count(row: np.ndarray) -> int:
    """How many ids are allowed."""
    return int.from_bytes(row.tobytes(), "little").bit_count()


def ids(row: np.ndarray) -> np.ndarray:
    """The ids that are allowed, rising."""
    some = np.flatnonzero(row)  # most masks are nearly empty
    bits = np.unpackbits(row[some].view(np.uint8), bitorder="little").reshape(-1, 32)
    word, bit = np.nonzero(bits)
    return some[word] * 32 + bit
