"""GGUF blocks inside of a Pallas Triton kernel: bytes as they lie, a scale (and minimum) a group.

A step of the kernels is one group of equal scales: sixteen elements along the inputs, element j with the
codes of inputs j and 16 + j of a group of 32, or that of input j of a group of 16 (Q6_K). Layouts are
those of `formats.gguf`; value = scale * (code - zero) + minimum.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

WIDTH = 16
"""Elements of a group."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """One GGUF type.

    Attributes:
      inputs: weights under one scale.
      groups, nbytes: groups and bytes of a block.
      bits: of a code.
      zero: what is taken from codes; None where they are signed.
      minimum: whether something is added.
    """

    inputs: int
    groups: int
    nbytes: int
    bits: int
    zero: int | None
    minimum: bool = False


LAYOUTS = {
    "Q4_0": Layout(32, 1, 18, 4, 8),
    "Q4_1": Layout(32, 1, 20, 4, 0, True),
    "Q8_0": Layout(32, 1, 34, 8, None),
    "Q4_K": Layout(32, 8, 144, 4, 0, True),
    "Q6_K": Layout(16, 16, 210, 6, 32),
}


class Group:
    """Loads of one group of some rows.

    Args:
      plane: Ref of uint8 [M, N, bytes of a row].
      row: int32 [n].
      group: int32 [], which of a row's.
    """

    def __init__(self, kind: str, plane: Any, member: jax.Array, row: jax.Array, group: Any):
        self.kind, self.plane, self.member, self.row = kind, plane, member, row
        layout = LAYOUTS[kind]
        # The step behind the last one loads ahead too: it finds the last group again.
        group = jnp.minimum(_strong(group), plane.shape[-1] // layout.nbytes * layout.groups - 1)
        self.start = group // layout.groups * layout.nbytes
        self.group = group % layout.groups

    def codes(self) -> list[jax.Array]:
        """The bytes that `elements` wants, uint8 [n, 16] each."""
        if self.kind in ("Q4_0", "Q4_1"):
            return [self._run({"Q4_0": 2, "Q4_1": 4}[self.kind])]
        if self.kind == "Q8_0":
            return [self._run(2), self._run(18)]
        if self.kind == "Q4_K":
            first = 16 + self.group // 2 * 32
            return [self._run(first), self._run(first + 16)]
        half, run, odd = self.group // 8, self.group // 2 % 4, self.group % 2
        low = half * 64 + run % 2 * 32 + odd * 16
        return [self._run(low), self._run(128 + half * 32 + odd * 16)]

    def numbers(self) -> tuple[jax.Array, jax.Array | None]:
        """Scale and minimum, float32 [n]."""
        if self.kind == "Q4_K":
            g = self.group
            a, b, c = (self._byte(4 + i) for i in (g, g + 4, jnp.maximum(g - 4, 0)))
            # In the upper four groups the low bits are in the last four bytes; g + 4 is theirs.
            scale = jnp.where(g < 4, a & 63, b & 15 | c >> 6 << 4)
            low = jnp.where(g < 4, b & 63, b >> 4 | a >> 6 << 4)
            return self._half(0) * _float(scale), -self._half(2) * _float(low)
        if self.kind == "Q6_K":
            signed = lax.bitcast_convert_type(self._byte(192 + self.group), jnp.int32)
            signed = jnp.where(signed >= 128, signed - 256, signed)
            return self._half(208) * signed.astype(jnp.float32), None
        return self._half(0), self._half(2) if self.kind == "Q4_1" else None

    def _run(self, first: Any) -> jax.Array:
        at = self.start + first + jnp.arange(WIDTH, dtype=jnp.int32)
        shape = (self.row.shape[0], WIDTH)
        index = (self.member, self.row[:, None], at[None, :])
        return plgpu.load(self.plane.at[tuple(jnp.broadcast_to(i, shape) for i in index)])

    def _byte(self, at: Any) -> jax.Array:
        """uint32 [n]."""
        index = (self.member, self.row, self.start + at)
        view = self.plane.at[tuple(jnp.broadcast_to(i, self.row.shape) for i in index)]
        return plgpu.load(view).astype(jnp.uint32)

    def _half(self, at: int) -> jax.Array:
        """float32 [n] of a little-endian float16."""
        bits = self._byte(at) | self._byte(at + 1) << 8
        return lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.float16).astype(jnp.float32)


def _strong(group: Any) -> jax.Array:
    """int32 []. Where sums are not split, steps are counted from a plain 0, and Pallas makes a bool of
    what a number of weak type is divided by."""
    return jnp.asarray(group, jnp.int32)


def _float(code: jax.Array) -> jax.Array:
    return code.astype(jnp.int32).astype(jnp.float32)


def elements(kind: str, codes: list[jax.Array], group: Any) -> jax.Array:
    """uint32 [n, 16]: the code of input j from bit 0 on, that of input 16 + j `bits` higher.

    Args:
      group: int32 [], which of a row's.
    """
    first, *rest = (c.astype(jnp.uint32) for c in codes)
    group = _strong(group)
    if kind in ("Q4_0", "Q4_1"):
        return first
    if kind == "Q8_0":
        return first | rest[0] << 8
    if kind == "Q4_K":
        by = (group % 2 * 4).astype(jnp.uint32)
        return first >> by & 15 | (rest[0] >> by & 15) << 4
    run = group // 2 % 4
    low = first >> (run // 2 * 4).astype(jnp.uint32) & 15
    return low | (rest[0] >> (run * 2).astype(jnp.uint32) & 3) << 4
