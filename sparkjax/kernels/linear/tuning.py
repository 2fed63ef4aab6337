"""Tile sizes of the matrix kernels, by kind of code and number of rows.

Up to `DECODE_ROWS` rows everything that decides the order of a sum (words, splits) is the same, so
that a row's bits do not depend on its company. The tables hold what was measured to be best on an
H200 within the 99 KiB of shared memory that a GB10 has; docs/performance.md has the runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

from .planes import Spec
from .tile import Tile

DECODE_ROWS = 64
"""Rows up to which a row's bits do not depend on how many there are, and up to which weights are
decoded where they are multiplied; beyond, in panels."""
PROGRAMS = 512
"""Programs that a decode launch wants at least: a few for each multiprocessor, whatever the device,
as the number of splits decides bits."""
STEPS = 4
"""Steps that each share of a sum keeps, so that its loads overlap."""
EXPERT_PROGRAMS, EXPERT_STEPS = 640, 2
"""The same of the expert layer, at one token."""

_DECODE = {
    "gguf": Tile(outputs=64, words=16, warps=2, stages=2),
    "bf16": Tile(outputs=32, words=128, warps=4, stages=4),
    "bf12": Tile(outputs=32, words=64, warps=2, stages=3),
    "e4m3": Tile(outputs=32, words=64, warps=2, stages=4),
    "e4m3 blocks": Tile(outputs=64, words=32, warps=2, stages=5),
    "int8": Tile(outputs=32, words=64, warps=2, stages=4),
    "e2m1": Tile(outputs=32, words=64, warps=2, stages=3),
    "int4": Tile(outputs=128, words=16, warps=2, stages=4),
    "bits": Tile(outputs=128, words=16, warps=2, stages=4),
    "across": Tile(outputs=256, words=64, warps=2, stages=4),
    "trellis": Tile(outputs=64, words=128, warps=4, stages=3),
}
_EXPERTS = {
    "gguf": Tile(outputs=64, words=16, warps=2, stages=2),
    "bf16": Tile(outputs=32, words=128, warps=4, stages=3),
    "bf12": Tile(outputs=64, words=32, warps=4, stages=4),
    "e4m3": Tile(outputs=64, words=32, warps=4, stages=4),
    "int8": Tile(outputs=64, words=32, warps=4, stages=4),
    "e2m1": Tile(outputs=64, words=32, warps=4, stages=3),
    "int4": Tile(outputs=64, words=16, warps=2, stages=4),
    "bits": Tile(outputs=64, words=16, warps=2, stages=4),
    "across": Tile(outputs=256, words=64, warps=2, stages=4),
    "trellis": Tile(outputs=64, words=128, warps=4, stages=3),
}
_EXPERTS_MANY = {
    "gguf": Tile(outputs=64, words=16, warps=4, stages=2),
    "bf16": Tile(outputs=64, words=64, warps=4, stages=3),
    "bf12": Tile(outputs=64, words=32, warps=4, stages=3),
    "e4m3": Tile(outputs=64, words=32, warps=4, stages=3),
    "int8": Tile(outputs=64, words=32, warps=4, stages=3),
    "e2m1": Tile(outputs=128, words=16, warps=4, stages=2),
    "int4": Tile(outputs=128, words=16, warps=4, stages=2),
    "bits": Tile(outputs=128, words=16, warps=4, stages=2),
    "across": Tile(outputs=256, words=64, warps=2, stages=3),
    "trellis": Tile(outputs=64, words=128, warps=4, stages=2),
}
_PANEL = {
    "gguf": Tile(outputs=32, words=16, warps=4),
    "bf12": Tile(outputs=32, words=32, warps=4),
    "e4m3": Tile(outputs=32, words=32, warps=4),
    "int8": Tile(outputs=32, words=32, warps=4),
    "e2m1": Tile(outputs=16, words=32, warps=4),
    "int4": Tile(outputs=32, words=16, warps=4),
    "bits": Tile(outputs=32, words=16, warps=4),
    "across": Tile(outputs=128, words=32, warps=4),
    "trellis": Tile(outputs=64, words=64, warps=4),
}
_PRODUCT = Tile(outputs=128, words=64, rows=128, warps=4, stages=3)
_LARGER = {"NVIDIA H200": Tile(outputs=128, words=64, rows=256, warps=8, stages=3)}
"""Products of many rows on devices with more shared memory."""


def tile_for(spec: Spec, rows: int) -> Tile:
    """The tile for a weight and up to `DECODE_ROWS` rows of x."""
    stepped = spec.code == "e4m3" and spec.step < spec.words
    key = "e4m3 blocks" if stepped else _key(spec)
    tile = _fitted(_DECODE[key], spec)
    steps = -(-spec.words // tile.words)
    programs = -(-spec.rows // tile.outputs)
    splits = 1
    while programs * splits < PROGRAMS and steps >= 2 * STEPS * splits:
        splits *= 2
    # Two tiles of 32 rows of 4-bit integers are faster than one of 64.
    most = min(_most(spec), 32) if key == "int4" else _most(spec)
    return _rows(dataclasses.replace(tile, splits=splits), spec, min(most, _power(rows)))


def expert_rows(specs: Sequence[Spec], tokens: int, k: int, count: int) -> int:
    """Pairs of a token and one of its k experts, of `count`, in a tile of the expert layer."""
    # Those that an expert has on average, twice over, as some have more.
    return max(8, min(*map(_most, specs), _power(2 * tokens * k // count)))


def expert_tile(spec: Spec, tokens: int, rows: int, k: int, weights: int = 1) -> Tile:
    """The tile of one of the expert layer's products.

    Args:
      rows: from `expert_rows`.
      k: experts of a token.
      weights: how many of this spec are multiplied at once.
    """
    few = tokens <= DECODE_ROWS
    tile = _fitted((_EXPERTS if few else _EXPERTS_MANY)[_key(spec)], spec)
    if few:
        # A single token's experts have to fill the device.
        programs, splits = k * -(-spec.rows // tile.outputs), 1
        steps = -(-spec.words // tile.words)
        while programs * splits < EXPERT_PROGRAMS and steps >= 2 * EXPERT_STEPS * splits:
            splits *= 2
        tile = dataclasses.replace(tile, splits=splits)
    return _rows(tile, spec, rows, weights)


def many(spec: Spec) -> tuple[Tile, Tile]:
    """Tiles of decoding a panel and of the product with many rows of x."""
    device = jax.devices()[0]
    product = _LARGER.get(device.device_kind, _PRODUCT) if device.platform == "gpu" else _PRODUCT
    return _fitted(_PANEL.get(_key(spec), product), spec), product


def _key(spec: Spec) -> str:
    return "across" if spec.across == 8 else spec.code


def _most(spec: Spec) -> int:
    """The most rows of x in a tile: every slot of an element has sums of its own in registers."""
    return 64 if spec.across < 8 else 16


def _rows(tile: Tile, spec: Spec, rows: int, weights: int = 1) -> Tile:
    """The tile for `rows` rows of x and several weights, with as many stages as shared memory
    holds."""
    rows = max(8, rows)
    # What is gathered goes through registers.
    size = 0 if spec.ahead else 2 if spec.code == "bf16" else 4 * spec.loads
    elements = tile.outputs // spec.across * tile.words
    step = weights * size * elements + 2 * spec.fields * rows * tile.words
    stages = max(1, min(tile.stages, 88 * 1024 // step))
    return dataclasses.replace(tile, rows=rows, stages=stages)


def _fitted(tile: Tile, spec: Spec) -> Tile:
    """The tile with no more words than a block scale covers, and fit for group scales."""
    # Sizes must be powers of two, and a tile must not cross into another block's scale.
    step = spec.step & -spec.step if spec.step < spec.words else _power(spec.words)
    words = min(tile.words, max(16, step))
    if spec.group:
        words = max(words, 4 * spec.group)
    return dataclasses.replace(tile, words=words)


def _power(value: int) -> int:
    """The next power of two."""
    return 1 << max(value - 1, 0).bit_length()
