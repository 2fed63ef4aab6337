"""Running a model's layers so that compile time does not grow with depth.

Layers of one kind are stacked. A model of mixed kinds is cut into segments, each a short pattern
of layers repeated many times, and each segment is one `lax.scan` whose body holds the pattern
once. Parameters and caches are never scan inputs: they stay whole, and a layer finds its own part
by index.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Segment:
    """Layers start .. start + period * repeats - 1: `period` kinds, `repeats` times over."""

    start: int
    period: int
    repeats: int


@functools.lru_cache(maxsize=256)
def segments(kinds: tuple[Hashable, ...], longest: int = 16) -> tuple[Segment, ...]:
    """Cuts layers into segments such that the fewest layer bodies are compiled."""
    n = len(kinds)
    best: list[tuple[int, int, tuple[Segment, ...]]] = [(0, 0, ())] * (n + 1)
    for start in range(n - 1, -1, -1):
        options = []
        for period in range(1, min(longest, n - start) + 1):
            repeats = 1
            while True:
                end = start + period * repeats
                cost, count, rest = best[end]
                segment = Segment(start, period, repeats)
                options.append((cost + period, count + 1, (segment, *rest)))
                if kinds[end : end + period] != kinds[start : start + period]:
                    break
                repeats += 1
        best[start] = min(options, key=lambda option: option[:2])
    return best[0][2]


@dataclasses.dataclass(frozen=True, eq=False)
class Layer:
    """One layer of a running model.

    Attributes:
      kind: its static kind.
      index: its number in the model: an int, or a traced int32 inside a scan.
    """

    kind: Any
    segment: Segment
    offset: int
    repeat: Any

    @property
    def index(self) -> Any:
        return self.segment.start + self.offset + self.repeat * self.segment.period

    def within(self, stack: Sequence[int]) -> Any:
        """Its place in an array that stacks the layers `stack` (rising layer numbers)."""
        first = self.segment.start + self.offset
        base = stack.index(first)
        if self.segment.repeats == 1:
            return base
        end = self.segment.start + self.segment.period
        stride = sum(self.segment.start <= layer < end for layer in stack)
        return base + self.repeat * stride


def lone(kind: Any, index: int) -> Layer:
    """A layer that runs by itself (a prediction layer)."""
    return Layer(kind, Segment(index, 1, 1), 0, 0)


Captured = dict[str, jax.Array]


def run_layers(
    kinds: Sequence[Hashable],
    block: Callable[[Any, Layer], tuple[Any, Captured]],
    carry: Any,
) -> tuple[Any, Captured]:
    """Runs `block(carry, layer) -> (carry, captured)` over all layers.

    Returns the last carry and each captured name stacked over the layers that captured it.
    """
    found: dict[str, dict[int, jax.Array]] = {}

    def keep(layers: range, captured: Captured, stacked: bool) -> None:
        for name, value in captured.items():
            for at, layer in enumerate(layers):
                found.setdefault(name, {})[layer] = value[at] if stacked else value

    for segment in segments(tuple(kinds)):
        pattern = kinds[segment.start : segment.start + segment.period]
        if segment.repeats == 1:
            for offset, kind in enumerate(pattern):
                carry, captured = block(carry, Layer(kind, segment, offset, 0))
                at = segment.start + offset
                keep(range(at, at + 1), captured, stacked=False)
            continue

        def body(carry: Any, repeat: Any, segment=segment, pattern=pattern) -> tuple[Any, list]:
            captured = []
            for offset, kind in enumerate(pattern):
                carry, one = block(carry, Layer(kind, segment, offset, repeat))
                captured.append(one)
            return carry, captured

        carry, stacks = jax.lax.scan(body, carry, jnp.arange(segment.repeats, dtype=jnp.int32))
        for offset, captured in enumerate(stacks):
            first = segment.start + offset
            last = segment.start + segment.period * segment.repeats
            keep(range(first, last, segment.period), captured, stacked=True)
    return carry, {
        name: jnp.stack([rows[layer] for layer in sorted(rows)]) for name, rows in found.items()
    }


def pick(captured: dict[str, Any], names: Collection[str]) -> Captured:
    """The captured values that were asked for."""
    return {name: value for name, value in captured.items() if name in names}


def tap(buffer: jax.Array | None, taps: tuple[int, ...], layer: Layer, x: jax.Array) -> Any:
    """`buffer[i] = x` when this layer is `taps[i]`; buffer is [len(taps), *x.shape]."""
    if buffer is None:
        return None
    match = jnp.asarray(taps) == layer.index
    place = jnp.where(match.any(), jnp.argmax(match), len(taps))
    return buffer.at[place].set(x, mode="drop")
