"""What one tick asks of the device, and what comes back: plain data between the three verbs."""

from __future__ import annotations

import dataclasses

from .records import Submit


@dataclasses.dataclass(frozen=True)
class Tile:
    """One prefill program call: `length` prompt tokens of one sequence, padded to `size`.

    `start` is the absolute position of the first token, a multiple of the largest tile.
    `last` marks the tile that ends the prompt: its program samples the first output token
    (unless the request only scores, max_tokens 0).
    """

    request: Submit
    slot: int
    start: int
    length: int
    size: int
    last: bool
    pages: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Row:
    """One decode row: feed the slot's newest token, sample the next.

    `position` is the position of the token that is fed; `step` counts output tokens before this
    one (so it is >= 1: the first came from the last prefill tile).
    """

    request: Submit
    slot: int
    position: int
    step: int
    pages: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """The device work of tick `number`: tiles in order, then one decode step of `size` rows."""

    number: int
    tiles: tuple[Tile, ...] = ()
    rows: tuple[Row, ...] = ()
    size: int = 0

    @property
    def empty(self) -> bool:
        return not self.tiles and not self.rows

    @property
    def work(self) -> tuple[Tile | Row, ...]:
        """Tiles, then rows: the order in which `Scheduler.commit` takes their outputs."""
        return self.tiles + self.rows


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """Log-probabilities (natural log, raw distribution) of one position."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True)
class Output:
    """What the device returned for one tile or row.

    `token` is None where nothing was sampled: a tile that is not the last, a request that only
    scores, a row whose slot met its stop id earlier. `prompt_logprobs`, where asked for, are those
    of the prompt tokens at positions start+1 .. start+length of a tile (one fewer in the last).
    `error` says why a request cannot go on; its token, if any, does not count.
    """

    slot: int
    token: int | None
    logprob: TokenLogprob | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    error: str | None = None


@dataclasses.dataclass(frozen=True)
class Event:
    """What a client learns of its request after a commit.

    `tokens` are new since the last event; `logprobs` go with them one to one, if asked for.
    `prompt_logprobs` come once, whole, with the first token (or the finish of a request that only
    scores): one entry per prompt position from 1 on, since nothing predicts the first token.
    `finish` is None while it runs, else "stop", "length", "cancelled" or "error".
    `cached` is the number of prompt tokens that were not computed (prefix reuse).
    `admitted` is when the request got a slot, in seconds of `time.monotonic()`; the service's
    thread adds it for metrics, nothing decides by it.
    """

    id: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish: str | None = None
    cached: int = 0
    error: str | None = None
    admitted: float | None = None
