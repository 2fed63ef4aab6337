"""One admitted request: where it lives, how far it is planned, how far it is known."""

from __future__ import annotations

import dataclasses

from .plan import Row, Tile, TokenLogprob
from .records import Submit


@dataclasses.dataclass(frozen=True)
class Cut:
    """Prompt tokens [start, start + length) run in a tile of `size`."""

    start: int
    length: int
    size: int


def canonical_cuts(length: int, tiles: tuple[int, ...]) -> tuple[Cut, ...]:
    """The tiles of a prompt of `length` tokens: a function of its length alone.

    Cuts lie at multiples of the largest tile; the remainder runs in the smallest tile that holds
    it. Neither load nor company ever moves a cut, so the arithmetic of a prompt is always the same.
    """
    largest = tiles[-1]
    cuts = []
    for start in range(0, length, largest):
        part = min(largest, length - start)
        cuts.append(Cut(start, part, next(size for size in tiles if size >= part)))
    return tuple(cuts)


def pages_for(tokens: int, page_size: int) -> int:
    """How many pages hold `tokens` tokens."""
    return -(-tokens // page_size)


@dataclasses.dataclass(eq=False)
class Sequence:
    """A request that holds a slot and pages.

    Attributes:
      cut: index of the next prompt tile to plan; len(cuts) once the whole prompt is planned.
      planned: output tokens that planned work will bring: an upper bound, since the device ends a
        sequence by itself at a stop id.
      committed: output tokens that are known.
      unread: planned tiles and rows whose outputs have not been committed.
      logprobs: of the prompt so far, one entry per position from 1 on.
    """

    request: Submit
    slot: int
    pages: tuple[int, ...]
    cuts: tuple[Cut, ...]
    cut: int = 0
    planned: int = 0
    committed: int = 0
    unread: int = 0
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)

    @property
    def prefilling(self) -> bool:
        """Some prompt tile is not planned yet."""
        return self.cut < len(self.cuts)

    @property
    def wants_row(self) -> bool:
        """The prompt is planned and one more token may be asked for."""
        return not self.prefilling and self.planned < self.request.max_tokens

    def covers_row(self, page_size: int) -> bool:
        """The pages held reach the token that the next row feeds."""
        return len(self.request.tokens) + self.planned <= len(self.pages) * page_size

    def next_tile(self) -> Tile:
        """Plans the next prompt tile."""
        cut = self.cuts[self.cut]
        self.cut += 1
        self.unread += 1
        last = not self.prefilling
        if last and self.request.max_tokens:
            self.planned = 1
        return Tile(
            request=self.request,
            slot=self.slot,
            start=cut.start,
            length=cut.length,
            size=cut.size,
            last=last,
            pages=self.pages,
        )

    def next_row(self) -> Row:
        """Plans the next decode row: it feeds output token `planned - 1`."""
        step = self.planned
        self.planned += 1
        self.unread += 1
        return Row(
            request=self.request,
            slot=self.slot,
            position=len(self.request.tokens) + step - 1,
            step=step,
            pages=self.pages,
        )
