"""deepseek_v41: DeepSeek-V4.1, whose layers share a few compressed caches and what their indexers
pick, with single-pass hyper-connections and n-gram memories.

Against deepseek_v4: a site collapses the streams with the weights of the site before it, so there
is no learned collapse at the end; only some layers own compressed entries and the others read
those of the latest one; an indexer's choice holds until the next indexer, and from one layer on
indexers look only inside blocks that this layer picked; query heads are not normalised; no experts
by token id; two layers add rows of an n-gram table, looked up on the host, to the streams.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from .config import ConfigReader, text_section


@dataclasses.dataclass(frozen=True)
class Config:
    vocab: int
    hidden: int
    ratios: tuple[int, ...]
    max_positions: int
    eos: tuple[int, ...]

    @property
    def layers(self) -> int:
        return len(self.ratios)


def read_config(values: Mapping[str, Any]) -> Config:
    r = ConfigReader(text_section(values))
    layers = r.read("num_hidden_layers", int)
    ratios = r.read("compress_ratios", list)
    return Config(
        vocab=r.read("vocab_size", int),
        hidden=r.read("hidden_size", int),
        # More entries than layers: the rest are the drafter's.
        ratios=tuple(ratios[:layers]),
        max_positions=r.read("max_position_embeddings", int, 1048576),
        eos=r.tokens("eos_token_id"),
    )
