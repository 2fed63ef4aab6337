"""Responses that are kept for `previous_response_id`, retrieval and background work.

In memory, bounded by count, bytes and age; the one that was not used for longest goes first. What
one API key stored, another one cannot see.
"""

from __future__ import annotations

import dataclasses
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from ..encoding import encode
from ..errors import ApiError, show
from .stream import ResponseStream

Json = dict[str, Any]
WORDS = ("message", "reasoning")


@dataclasses.dataclass(eq=False)
class Stored:
    """One response.

    Attributes:
      owner: which API key made it.
      items: the whole conversation in front of the response, its own input last.
      stream: the response itself, finished or not.
      events: of a background response that streams, in order.
      cancel: ends a background response that still runs.
    """

    owner: str
    items: tuple[Json, ...]
    stream: ResponseStream
    background: bool = False
    events: list[Json] | None = None
    cancel: Callable[[], None] | None = None
    size: int = 0
    used: float = 0.0

    @property
    def conversation(self) -> tuple[Json, ...]:
        """The items that a next request continues from. A call that was cut is none of them: its
        arguments are no JSON, and nobody can answer it."""
        said = [i for i in self.stream.output if i["type"] in WORDS or i["status"] != "incomplete"]
        return (*self.items, *said)

    @property
    def running(self) -> bool:
        """Whether it is not finished."""
        return self.stream.status in ("queued", "in_progress")


class Store:
    """Lives on the event loop.

    Args:
      most: responses.
      most_bytes: of their JSON, each with its whole conversation.
      seconds: for which an unused one is kept.
    """

    def __init__(
        self,
        most: int,
        most_bytes: int,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._most, self._most_bytes, self._seconds, self._clock = most, most_bytes, seconds, clock
        self._kept: OrderedDict[str, Stored] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, id: str, owner: str, param: str | None = None) -> Stored:
        """The response with this id, now the last one used.

        Raises:
          ApiError: 404 (400 where `param` names the field that asks for it).
        """
        self._expire()
        found = self._kept.get(id)
        if found is None or found.owner != owner:
            raise ApiError(
                404 if param is None else 400,
                f"{param or 'response'} {show(id)} is not here: unknown, deleted, or dropped for newer ones",
                param=param,
                code="response_not_found" if param is None else "previous_response_not_found",
            )
        found.used = self._clock()
        self._kept.move_to_end(id)
        return found

    def put(self, stored: Stored) -> None:
        """Keeps a response, or weighs it again once it is finished; drops what is too much.

        One that alone exceeds the bytes is not kept.
        """
        id = stored.stream.id
        self._drop(id)
        stored.size = len(encode([*stored.items, stored.stream.response()]))
        if stored.events is not None:
            stored.size += len(encode(stored.events))
        stored.used = self._clock()
        self._kept[id] = stored
        self.bytes += stored.size
        self._expire()
        for old in list(self._kept):
            if len(self._kept) <= self._most and self.bytes <= self._most_bytes:
                break
            if not self._kept[old].running:  # somebody waits for what still runs
                self._drop(old)

    def delete(self, id: str, owner: str) -> None:
        """Forgets a response; one that still runs is cancelled.

        Raises:
          ApiError: 404.
        """
        found = self.get(id, owner)
        if found.running and found.cancel is not None:
            found.cancel()
        self._drop(id)

    def _expire(self) -> None:
        oldest = self._clock() - self._seconds
        for id, stored in list(self._kept.items()):
            if stored.used >= oldest:
                break
            if not stored.running:
                self._drop(id)

    def _drop(self, id: str) -> None:
        stored = self._kept.pop(id, None)
        if stored is not None:
            self.bytes -= stored.size
