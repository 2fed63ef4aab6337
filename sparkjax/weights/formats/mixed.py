"""Layers (or experts) of one parameter in different formats, and the stacking of equal ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from .base import QuantizedTensor
from .bf16 import Bf16Tensor, alike


@struct.dataclass
class Mixed(QuantizedTensor):
    """A stack whose members have different formats: each stays as it is.

    Members are numbered in row-major order over the leading axes.

    Attributes:
      stacks: one per format: arrays or QuantizedTensors with leading axes [members, 1, ...], as
        many as the whole has.
      kinds: for each member, its stack.
      slots: for each member, its place there.
      stacked: sizes of the leading axes.
    """

    stacks: tuple[Any, ...]
    kinds: tuple[int, ...] = struct.field(pytree_node=False)
    slots: tuple[int, ...] = struct.field(pytree_node=False)
    stacked: tuple[int, ...] = struct.field(pytree_node=False)

    @property
    def lead(self) -> tuple[int, ...]:
        """Sizes of the leading axes."""
        return self.stacked

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape [..., N, K]."""
        return (*self.lead, *self.stacks[0].shape[-2:])

    def dequantize(self, layer: Any = None, dtype: Any = jnp.float32) -> jax.Array:
        """See `QuantizedTensor.dequantize`; a traced index chooses among the formats at run time."""
        index = () if layer is None else layer if isinstance(layer, tuple) else (layer,)
        start, rest = self._first(index), self.lead[len(index) :]

        def numbers(stack: Any, at: Any) -> jax.Array:
            if isinstance(stack, QuantizedTensor):
                return stack.dequantize(at, dtype)
            return stack[at].astype(dtype)

        if isinstance(start, int):
            members = [self._choose(start + i, numbers) for i in range(int(np.prod(rest)))]
            return jnp.stack(members).reshape(*rest, *self.shape[-2:])
        if not rest:
            return self._choose(start, numbers)
        members = start + jnp.arange(int(np.prod(rest)))
        found = lax.map(lambda member: self._choose(member, numbers), members)
        return found.reshape(*rest, *self.shape[-2:])

    def member(self, layer: Any, function: Callable[[Any, Any], jax.Array]) -> jax.Array:
        """`function(stack, index)` of the stack that holds the member at `layer` (an index for each
        leading axis; may be traced) and its index there. Results must have one shape and dtype."""
        return self._choose(self._first(layer if isinstance(layer, tuple) else (layer,)), function)

    def _first(self, index: tuple[Any, ...]) -> Any:
        """The number of the first member at an index of some leading axes; int unless traced."""
        strides = [int(np.prod(self.lead[i + 1 :])) for i in range(len(self.lead))]
        if all(isinstance(i, (int, np.integer)) for i in index):
            index = tuple(int(i) % n for i, n in zip(index, self.lead, strict=False))
        return sum(i * s for i, s in zip(index, strides, strict=False))

    def _choose(self, member: Any, function: Callable[[Any, Any], jax.Array]) -> jax.Array:
        ones = (0,) * (len(self.lead) - 1)
        if isinstance(member, int):
            return function(self.stacks[self.kinds[member]], (self.slots[member], *ones))
        member = jnp.clip(member, 0, len(self.kinds) - 1)
        kind, slot = jnp.asarray(self.kinds)[member], jnp.asarray(self.slots)[member]
        ways = [
            lambda slot, stack=stack: function(stack, (slot, *ones)) for stack in self.stacks
        ]
        return lax.switch(kind, ways, slot)

    def take_rows(self, ids: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
        """A stack has no rows of its own.

        Raises:
          ValueError: always.
        """
        raise ValueError(f"rows of a stack of {self.lead} matrices; allowed: one matrix")


Join = Callable[[Sequence[Any], tuple[int, ...]], Any]
"""(equal planes of all members, leading axes) -> the stacked plane."""


def copied(planes: Sequence[np.ndarray], lead: tuple[int, ...]) -> np.ndarray:
    """A new array of all planes."""
    if not lead:
        return np.ascontiguousarray(planes[0])
    out = np.empty((len(planes), *planes[0].shape), planes[0].dtype)
    for i, plane in enumerate(planes):
        out[i] = plane
    return out.reshape(*lead, *planes[0].shape)


def stack(members: Sequence[Any], lead: tuple[int, ...], join: Join = copied) -> Any:
    """Host arrays and nodes of one logical matrix shape, stacked over leading axes.

    Args:
      members: in row-major order over `lead`; () stands for a single one.
      join: what makes a stacked plane.

    Returns:
      An array or a node; a Mixed where the members do not have one format.
    """
    members = _alike(list(members))
    if not lead:
        return jax.tree.map(lambda plane: join([plane], ()), members[0])
    kinds: dict[Any, list[int]] = {}
    for i, member in enumerate(members):
        kinds.setdefault(_signature(member), []).append(i)
    if len(kinds) == 1:
        return _stacked(members, lead, join)
    kind_of, slot_of, stacks = [0] * len(members), [0] * len(members), []
    for kind, places in enumerate(kinds.values()):
        for slot, i in enumerate(places):
            kind_of[i], slot_of[i] = kind, slot
        ones = (1,) * (len(lead) - 1)
        stacks.append(_stacked([members[i] for i in places], (len(places), *ones), join))
    return Mixed(tuple(stacks), tuple(kind_of), tuple(slot_of), tuple(lead))


def _signature(member: Any) -> Any:
    planes, structure = jax.tree.flatten(member)
    return structure, tuple((p.shape, str(p.dtype)) for p in planes)


def _alike(members: list[Any]) -> list[Any]:
    """Differences that are none: room for escapes, and dense members' float dtypes."""
    packed = [i for i, m in enumerate(members) if isinstance(m, Bf16Tensor)]
    groups: dict[tuple[int, int], list[int]] = {}
    for i in packed:
        groups.setdefault((members[i].rows, members[i].cols), []).append(i)
    for places in groups.values():
        for i, node in zip(places, alike([members[i] for i in places]), strict=True):
            members[i] = node
    return members


def _stacked(members: Sequence[Any], lead: tuple[int, ...], join: Join) -> Any:
    return jax.tree.map(lambda *planes: join(planes, lead), *members)
