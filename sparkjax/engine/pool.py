"""The cache pages of one pool: who holds them is a count, not a name.

A page may be held several times (a prefix shared by sequences); it is free again when the last
holder lets go, and its generation then rises, so that whoever remembered (page, generation) sees
that the contents are gone.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable


class PoolError(RuntimeError):
    """The pool was asked for something impossible: a bug of the caller, never of a request."""


class PagePool:
    """Pages 0 .. total-1. The lowest free ids go out first, so equal histories give equal pages."""

    def __init__(self, total: int):
        if total < 0:
            raise ValueError(f"total: {total} is below 0")
        self.total = total
        self._free = list(range(total))  # a heap; a rising list is one
        self._holders = [0] * total
        self._generations = [0] * total

    @property
    def free(self) -> int:
        """How many pages nobody holds."""
        return len(self._free)

    @property
    def used(self) -> int:
        """How many pages somebody holds, each counted once."""
        return self.total - len(self._free)

    def holders(self, page: int) -> int:
        self._known(page)
        return self._holders[page]

    def generation(self, page: int) -> int:
        """How often this page has been freed."""
        self._known(page)
        return self._generations[page]

    def alloc(self, count: int) -> list[int]:
        """Takes `count` free pages, lowest ids first. Raises PoolError if there are fewer."""
        if count < 0:
            raise PoolError(f"asked for {count} pages")
        if count > len(self._free):
            raise PoolError(f"asked for {count} pages; {len(self._free)} of {self.total} are free")
        pages = [heapq.heappop(self._free) for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, page: int) -> None:
        """One more holder of a page that is held. Raises PoolError if it is free."""
        self._known(page)
        if not self._holders[page]:
            raise PoolError(f"page {page} is free and cannot be shared")
        self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One holder less of each page (as often as it is listed).

        Raises PoolError, and changes nothing, if a page is released more often than it is held.
        """
        pages = list(pages)
        for page, times in Counter(pages).items():
            self._known(page)
            if times > self._holders[page]:
                raise PoolError(
                    f"page {page} released {times} times but held {self._holders[page]} times"
                )
        for page in pages:
            self._holders[page] -= 1
            if not self._holders[page]:
                self._generations[page] += 1
                heapq.heappush(self._free, page)

    def check(self) -> None:
        """Raises PoolError unless every page is either free, once, or held."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise PoolError("a page is free twice")
        held = {page for page, count in enumerate(self._holders) if count > 0}
        if free & held:
            raise PoolError(f"pages both free and held: {sorted(free & held)}")
        if len(free) + len(held) != self.total:
            raise PoolError(f"{len(free)} free + {len(held)} held != {self.total} pages")

    def _known(self, page: int) -> None:
        if not 0 <= page < self.total:
            raise PoolError(f"page {page} is not one of 0..{self.total - 1}")
