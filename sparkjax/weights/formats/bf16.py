"""BF16 weights kept in 12 bits, without loss: this project's own form, in memory only.

    bits = sign << 15 | exponent << 7 | mantissa,  exponent = base + code, code 1 .. 15

Plane `low` holds sign << 7 | mantissa, a byte each; plane `codes` the 4-bit codes, the low nibble
first. Code 0 is an escape: its exponent stands in a list, sorted by position. `base` (0 .. 240) is
chosen per matrix so that the fewest weights escape. Prior art: DFloat11 (Zhang et al. 2025).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from ...mesh.units import take
from . import bits, gather
from .base import Plane, QuantizedTensor

MOST_ESCAPES = 0.02
"""Share of escapes above which a tensor stays plain BF16."""
SMALLEST = 1 << 12
"""Elements below which a tensor stays plain BF16."""


@struct.dataclass
class Bf16Tensor(QuantizedTensor):
    """A BF16 matrix in 12 bits a weight.

    Attributes:
      low: uint8 [..., N, K].
      codes: uint8 [..., N, ceil(K / 2)].
      base: int32 [..., 1, 1].
      places: int32 [..., 1, escapes]: n * K + k, ascending; N * K fills up.
      exponents: uint8 [..., 1, escapes].
      first: int32 [..., N, 1]: how many escapes there are before each row of its share.
      widest: the most escapes of a row.
    """

    low: Plane
    codes: Plane
    base: Plane
    places: Plane
    exponents: Plane
    first: Plane
    widest: int = struct.field(pytree_node=False)
    rows: int = struct.field(pytree_node=False)
    cols: int = struct.field(pytree_node=False)

    def _main(self) -> tuple[jax.Array, int, int, int]:
        return self.low, 2, self.rows, self.cols

    def words(self) -> jax.Array:
        """uint16 [..., N, K]: the bits of the weights."""
        exponent = jnp.asarray(bits.nibbles(self.codes, self.cols) + self.base)
        flat = exponent.reshape(-1, self.rows * self.cols)
        batch = jnp.arange(flat.shape[0])[:, None]
        places = self.places.reshape(flat.shape[0], -1)
        listed = self.exponents.reshape(flat.shape[0], -1).astype(jnp.int32)
        flat = flat.at[batch, places].set(listed, mode="drop")
        return _join(self.low, flat.reshape(exponent.shape))

    def numbers(self) -> jax.Array:
        """float32 [..., N, K]."""
        return lax.bitcast_convert_type(self.words(), jnp.bfloat16).astype(jnp.float32)

    def _rows(self, ids: jax.Array) -> jax.Array:
        exponent = bits.nibbles(self.codes[ids], self.cols) + self.base
        at = self.first[ids] + jnp.arange(self.widest)
        at = jnp.minimum(at, self.places.shape[-1] - 1)
        column = self.places[0, at] - ids[:, None] * self.cols
        # A neighbour's escapes fall outside of this row; negative places would count from its end.
        column = jnp.where((column < 0) | (column >= self.cols), self.cols, column)
        listed = self.exponents[0, at].astype(jnp.int32)
        exponent = exponent.at[jnp.arange(len(ids))[:, None], column].set(listed, mode="drop")
        words = _join(self.low[ids], exponent)
        return lax.bitcast_convert_type(words, jnp.bfloat16).astype(jnp.float32)

    def pick(
        self, axis: int, index: np.ndarray, parts: int = 1, only: int | None = None
    ) -> Bf16Tensor:
        """See `QuantizedTensor.pick`."""
        if gather.is_identity(index, self.shape[axis], parts):
            return self
        words = np.asarray(self.words())
        shares = np.split(take(words, axis, index), parts, axis)
        base = int(np.asarray(self.base).reshape(-1)[0])
        packed = [_pack(share, base) for share in shares]
        most = max(p.places.shape[-1] for p in packed)
        widest = max(p.widest for p in packed)
        packed = [_padded(p, most).replace(widest=widest) for p in packed]
        if only is not None:
            return packed[only]
        return jax.tree.map(lambda *planes: np.concatenate(planes, axis), *packed)


def _join(low: jax.Array, exponent: jax.Array) -> jax.Array:
    low = low.astype(jnp.uint16)
    sign, mantissa = low >> 7, low & 127
    return sign << 15 | (exponent & 255).astype(jnp.uint16) << 7 | mantissa


def best_base(words: np.ndarray) -> tuple[int, int]:
    """The base under which the fewest of these bit patterns escape, and how many do."""
    counts = np.bincount((words.reshape(-1) >> 7) & 255, minlength=256)
    sums = np.concatenate([[0], np.cumsum(counts)])
    inside = sums[16:] - sums[1:-15]  # of exponents e .. e + 14, from 1 on
    start = int(inside.argmax()) + 1
    return start - 1, int(words.size - inside[start - 1])


def bf16_tensor(array: np.ndarray, *, always: bool = False) -> Bf16Tensor | None:
    """A BF16 matrix [N, K] in 12 bits; None where it is better left as it is.

    Args:
      always: pack small matrices and those with many escapes too.
    """
    words = np.ascontiguousarray(array).view(np.uint16)
    base, escapes = best_base(words) if words.size else (0, 0)
    if not always and (words.size < SMALLEST or escapes > MOST_ESCAPES * words.size):
        return None
    return _pack(words, base)


def _pack(words: np.ndarray, base: int) -> Bf16Tensor:
    n, k = words.shape
    exponent = ((words >> 7) & 255).astype(np.int32)
    code = exponent - base
    escaped = (code < 1) | (code > 15)
    places = np.flatnonzero(escaped.reshape(-1)).astype(np.int32)
    count = escaped.sum(1)
    first = (np.cumsum(count) - count).astype(np.int32)[:, None]
    low = ((words >> 8) & 128 | words & 127).astype(np.uint8)
    codes = bits.pack_nibbles(np.where(escaped, 0, code))
    listed = exponent.reshape(-1)[places].astype(np.uint8)
    node = Bf16Tensor(
        low,
        codes,
        np.full((1, 1), base, np.int32),
        places[None],
        listed[None],
        first,
        int(count.max(initial=0)),
        n,
        k,
    )
    # One entry at least, so that lookups have something to look at.
    return _padded(node, max(1, len(places)))


def _padded(node: Bf16Tensor, count: int) -> Bf16Tensor:
    """The node with room for `count` escapes, as stacking needs it."""
    fill = [(0, 0)] * (node.places.ndim - 1) + [(0, count - node.places.shape[-1])]
    return node.replace(
        places=np.pad(node.places, fill, constant_values=node.rows * node.cols),
        exponents=np.pad(node.exponents, fill),
    )


def alike(nodes: list[Bf16Tensor]) -> list[Bf16Tensor]:
    """Nodes of one shape with equal room for escapes, so that they stack."""
    most = max(n.places.shape[-1] for n in nodes)
    widest = max(n.widest for n in nodes)
    return [_padded(n, most).replace(widest=widest) for n in nodes]
