"""Running a model's layers so that compile time does not grow with depth.

Layers of one kind are stacked. A model of mixed kinds is cut into segments, each a short pattern
of layers repeated many times. A segment is one `lax.scan` whose body holds the pattern once, and
inside of it every run of equal layers is one `lax.scan` too: (S S S S S F) x 8 compiles S and F
once. Parameters and caches are never scan inputs: they stay whole, and a layer finds its own part
by index.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
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


def runs(kinds: Sequence[Hashable]) -> list[tuple[int, int]]:
    """(first, length) of every run of equal kinds."""
    found, at = [], 0
    for _, run in itertools.groupby(kinds):
        length = len(list(run))
        found.append((at, length))
        at += length
    return found


@functools.lru_cache(maxsize=256)
def segments(kinds: tuple[Hashable, ...], longest: int = 16) -> tuple[Segment, ...]:
    """Cuts layers into segments such that the fewest layer bodies are compiled."""
    n = len(kinds)
    best: list[tuple[int, int, tuple[Segment, ...]]] = [(0, 0, ())] * (n + 1)
    for start in range(n - 1, -1, -1):
        options = []
        for period in range(1, min(longest, n - start) + 1):
            bodies = len(runs(kinds[start : start + period]))
            repeats = 1
            while True:
                end = start + period * repeats
                cost, count, rest = best[end]
                segment = Segment(start, period, repeats)
                options.append((cost + bodies, count + 1, (segment, *rest)))
                if kinds[end : end + period] != kinds[start : start + period]:
                    break
                repeats += 1
        best[start] = min(options, key=lambda option: option[:2])
    return best[0][2]


@dataclasses.dataclass(frozen=True, eq=False)
class Layer:
    """One layer of a running model: `inner` of `run` equal layers from `offset` on, in repetition
    `repeat` of a segment.

    Attributes:
      kind: its static kind.
      index: its number in the model: an int, or a traced int32 inside a scan.
    """

    kind: Any
    segment: Segment
    offset: int
    repeat: Any
    run: int = 1
    inner: Any = 0

    @property
    def index(self) -> Any:
        first = self.segment.start + self.offset
        return first + self.inner + self.repeat * self.segment.period

    def within(self, stack: Sequence[int]) -> Any:
        """Its place in an array that stacks the layers `stack` (rising layer numbers)."""
        first = self.segment.start + self.offset
        base, segment = stack.index(first), self.segment
        stride = sum(segment.start <= layer < segment.start + segment.period for layer in stack)
        for repeat in range(segment.repeats):
            here, start = base + repeat * stride, first + repeat * segment.period
            if tuple(stack[here : here + self.run]) != tuple(range(start, start + self.run)):
                raise ValueError(f"of equal layers, {first} and on, only some are in {tuple(stack)}")
        if segment.repeats == 1:
            return base + self.inner
        return base + self.inner + self.repeat * stride


def lone(kind: Any, index: int) -> Layer:
    """A layer that runs by itself (a prediction layer)."""
    return Layer(kind, Segment(index, 1, 1), 0, 0)


Captured = dict[str, jax.Array]


def _scan(body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, count: int) -> tuple[Any, Any]:
    """`body(carry, i)` for i < count; what it returns besides is stacked."""
    return jax.lax.scan(body, carry, jnp.arange(count, dtype=jnp.int32))


def _each(block: Callable[[Any, Layer], Any], layer: Layer) -> Callable[[Any, Any], Any]:
    """The scan's body over a run of equal layers."""
    return lambda carry, inner: block(carry, dataclasses.replace(layer, inner=inner))


def run_layers(
    kinds: Sequence[Hashable],
    block: Callable[[Any, Layer], tuple[Any, Captured]],
    carry: Any,
) -> tuple[Any, Captured]:
    """Runs `block(carry, layer) -> (carry, captured)` over all layers.

    Returns the last carry and each captured name stacked over the layers that captured it.
    """
    found: dict[str, dict[int, jax.Array]] = {}
    for segment in segments(tuple(kinds)):
        pattern = kinds[segment.start : segment.start + segment.period]
        cuts = runs(pattern)

        def once(
            carry: Any, repeat: Any, segment=segment, pattern=pattern, cuts=cuts
        ) -> tuple[Any, list[Captured]]:
            captured = []
            for offset, length in cuts:
                layer = Layer(pattern[offset], segment, offset, repeat, length)
                if length == 1:
                    carry, one = block(carry, layer)
                    one = {name: value[None] for name, value in one.items()}
                else:

                    carry, one = _scan(_each(block, layer), carry, length)
                captured.append(one)
            return carry, captured

        if segment.repeats == 1:
            carry, stacks = once(carry, 0)
            stacks = [{name: v[None] for name, v in one.items()} for one in stacks]
        else:
            carry, stacks = _scan(once, carry, segment.repeats)
        # Captures are [repeats, run, ...] for each run of the pattern.
        for (offset, length), captured in zip(cuts, stacks, strict=True):
            for name, value in captured.items():
                for repeat in range(segment.repeats):
                    first = segment.start + offset + repeat * segment.period
                    for inner in range(length):
                        found.setdefault(name, {})[first + inner] = value[repeat, inner]
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
