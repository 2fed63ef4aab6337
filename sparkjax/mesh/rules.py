"""Which logical axes of weights and caches are spread over ranks.

Models name logical axes only; changing the strategy is changing this table.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.sharding import PartitionSpec

from .context import RANKS

RULES: dict[str, str | None] = {
    "layers": None,
    "experts": None,
    "embed": None,
    "heads": RANKS,
    "kv_heads": RANKS,
    "ffn": RANKS,
    "vocab": RANKS,
}


def spec(axes: Sequence[str | None], ranks: int) -> PartitionSpec:
    """The PartitionSpec of a tensor with these logical axes."""
    if ranks == 1:
        return PartitionSpec()
    names = [None if axis is None else RULES[axis] for axis in axes]
    if sum(name is not None for name in names) > 1:
        raise ValueError(f"axes {tuple(axes)} would shard one tensor twice")
    return PartitionSpec(*names)
