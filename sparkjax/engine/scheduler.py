"""The scheduler: a deterministic function of journal records and committed tokens.

Each tick is `schedule(tick)`, then the device runs the plan, then `commit(number, outputs)`. Tick
N+1 may be scheduled and sent to the device before tick N is committed. Its positions are known all
the same: every planned row brings exactly one token, unless the device met a stop id earlier and
closed the slot; rows that overran in this way bring None and are ignored. The device runs programs
in order, so pages and slots that a finished or cancelled sequence gives back can be planned for
another at once: whatever still runs for the old one runs first.

Every rank makes the same calls in the same order (`commit` of an empty plan is one of them). The
digest folds each operation, the calls included, so a rank that strays is found at the next tick.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable

from . import admission
from .plan import Event, Output, Plan, Row, Tile, TokenLogprob
from .pool import PagePool
from .records import Limits, Submit, Tick
from .sequence import Sequence, canonical_cuts, pages_for

Outputs = list[Output] | tuple[Output, ...]

FNV_OFFSET = 0xCBF29CE484222325
FNV_PRIME = 0x100000001B3


def fnv1a(data: bytes, state: int = FNV_OFFSET) -> int:
    """64-bit FNV-1a (Fowler, Noll, Vo) of `data`, continued from `state`."""
    for byte in data:
        state = ((state ^ byte) * FNV_PRIME) & 0xFFFFFFFFFFFFFFFF
    return state


class DigestMismatch(RuntimeError):
    """This rank's operations differ from rank 0's. Nothing of the tick was applied."""

    def __init__(self, tick: int, ours: int, theirs: int):
        super().__init__(
            f"tick {tick}: this rank's operation digest is {ours:016x}, rank 0's is {theirs:016x}"
        )
        self.tick, self.ours, self.theirs = tick, ours, theirs


class InvariantError(RuntimeError):
    """The scheduler's books do not balance: a bug; go no further."""


@dataclasses.dataclass(frozen=True)
class Gauges:
    """For metrics. `running` sequences hold a slot; `prefilling` are those of them whose prompt
    is not fully planned; `waiting` requests are queued; `pages` are held of `pages_total`."""

    running: int
    prefilling: int
    waiting: int
    pages: int
    pages_total: int


class Scheduler:
    """See the module's page. Raises ValueError if the limits make no sense."""

    def __init__(self, limits: Limits):
        admission.check_limits(limits)
        self.limits = limits
        self.pool = PagePool(limits.pages)
        self._slots: list[Sequence | None] = [None] * limits.slots
        self._live: dict[int, Sequence] = {}
        self._line = admission.WaitingLine()
        self._turns: deque[Sequence] = deque()  # prefilling sequences, next turn first
        self._flight: deque[tuple[Plan, list[Event]]] = deque()  # scheduled, not committed
        self._number: int | None = None
        self._newest = -1  # the highest request id seen
        self._digest = FNV_OFFSET
        self._accepted = self._ended = 0
        self.operations: list[str] | None = None
        """Where each operation is also put as text, if somebody wants it (a crash log)."""

    # What the front end and the metrics ask.

    def refusal(self, submit: Submit) -> str | None:
        """Why this request could never be served, or None. To be asked before it is journaled."""
        return admission.refusal(submit, self.limits)

    def queue_full(self, pending: int = 0) -> bool:
        """Whether one more request would wait beyond `limits.queue`.

        `pending` are requests that were accepted but are in no applied tick yet. Free slots count
        as room only while nobody waits: whoever waits now could not use them.
        """
        waiting = len(self._line)
        room = self.limits.queue + (0 if waiting else self._slots.count(None))
        return waiting + pending >= room

    @property
    def idle(self) -> bool:
        """Nothing waits, nothing runs, and every tick is committed."""
        return not (self._line or self._live or self._flight)

    @property
    def digest(self) -> int:
        """64-bit digest of all operations so far, for `Tick.digest`."""
        return self._digest

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Numbers of the ticks that were scheduled but not committed, oldest first."""
        return tuple(plan.number for plan, _ in self._flight)

    def gauges(self) -> Gauges:
        return Gauges(
            running=len(self._live),
            prefilling=len(self._turns),
            waiting=len(self._line),
            pages=self.pool.used,
            pages_total=self.pool.total,
        )

    def check(self) -> None:
        """Raises InvariantError (or PoolError) unless pages, slots and requests all balance."""
        self.pool.check()
        seated = [seq for seq in self._slots if seq is not None]
        if {seq.request.id for seq in seated} != set(self._live) or len(seated) != len(self._live):
            raise InvariantError("slots and live sequences differ")
        held = sorted(page for seq in seated for page in seq.pages)
        if len(held) != sum(self.pool.holders(page) for page in range(self.pool.total)):
            raise InvariantError(f"sequences hold {len(held)} pages, the pool says otherwise")
        if any(id in self._line for id in self._live):
            raise InvariantError("a request both waits and runs")
        if self._accepted != self._ended + len(self._live) + len(self._line):
            raise InvariantError(
                f"{self._accepted} accepted != {self._ended} ended + {len(self._live)} running"
                f" + {len(self._line)} waiting"
            )
        if self.idle and (self.pool.used or seated):
            raise InvariantError(f"idle, yet {self.pool.used} pages and {len(seated)} slots held")

    # One tick.

    def schedule(self, tick: Tick) -> Plan:
        """Applies the record and plans the device's work. See `Plan` for its order.

        Raises DigestMismatch or ValueError (a record that rank 0 must not have written), with
        nothing applied. What the record itself ended is told by this tick's `commit`.
        """
        self._verify(tick)
        self._number = tick.number
        self._fold(f"N {tick.number}")
        events: list[Event] = []
        for ids, reason in ((tick.cancels, "cancelled"), (tick.stops, "stop")):
            for id in ids:
                self._end(id, reason, events)
        self._submit(tick, events)
        if self.limits.admission == "grow":
            self._grow(events)
        self._admit()
        rows = self._plan_rows()  # before the tiles: who ends its prompt now decodes from next tick
        tiles = self._plan_tiles(self.limits.busy_tiles if rows else self.limits.idle_tiles)
        size = next(size for size in self.limits.rows if size >= len(rows)) if rows else 0
        plan = Plan(tick.number, tiles, rows, size)
        self._flight.append((plan, events))
        return plan

    def commit(self, number: int, outputs: Outputs) -> list[Event]:
        """Takes what the device returned for tick `number`, the oldest one in flight.

        `outputs` holds one entry per tile, then one per row, in plan order (none for an empty
        plan). Each request has at most one event; those that the record ended come first. A tile's
        `prompt_logprobs`, where the request wants them, are of the prompt tokens at positions
        start+1 .. start+length: `length` entries, one fewer in the last tile.

        Raises ValueError, with nothing committed, where outputs and plan do not match.
        """
        if not self._flight or self._flight[0][0].number != number:
            raise ValueError(f"commit of tick {number}; in flight are {list(self.in_flight)}")
        plan, events = self._flight[0]
        work = plan.work
        _match(work, outputs)
        self._flight.popleft()
        self._fold(f"C {number}")
        for item, output in zip(work, outputs, strict=True):
            seq = self._live.get(item.request.id)
            if seq is None:  # cancelled, or it overran its stop
                continue
            seq.unread -= 1
            event = self._take(seq, item, output)
            if event is not None:
                events.append(event)
        return events

    # Applying a record.

    def _verify(self, tick: Tick) -> None:
        if tick.digest != self._digest:
            raise DigestMismatch(tick.number, self._digest, tick.digest)
        if self._number is not None and tick.number != self._number + 1:
            raise ValueError(f"tick {tick.number} follows tick {self._number}")
        newest = self._newest
        for submit in tick.submits:
            if submit.id <= newest:
                raise ValueError(f"tick {tick.number}: request id {submit.id} does not rise")
            newest = submit.id
            reason = self.refusal(submit)
            if reason is not None:
                raise ValueError(f"tick {tick.number}: request {submit.id}: {reason}")

    def _submit(self, tick: Tick, events: list[Event]) -> None:
        for submit in tick.submits:
            self._newest = submit.id
            self._accepted += 1
            self._fold(f"Q {submit.id} {len(submit.tokens)} {submit.max_tokens}")
            self._line.append(submit)
            if submit.id in tick.cancels:  # its client left before this tick: it never starts
                self._end(submit.id, "cancelled", events)

    def _end(self, id: int, reason: str, events: list[Event]) -> None:
        """Ends a request wherever it is. An id that has ended before is not an error: cancels
        and finishes cross on their way."""
        if id in self._line:
            self._line.remove(id)
        elif id in self._live:
            self._leave(self._live[id])
        else:
            return
        self._ended += 1
        self._fold(f"F {id} {reason}")
        events.append(Event(id, finish=reason))

    def _leave(self, seq: Sequence) -> None:
        """Gives back everything that a sequence holds."""
        del self._live[seq.request.id]
        self._slots[seq.slot] = None
        self.pool.release(seq.pages)
        if seq in self._turns:
            self._turns.remove(seq)

    def _admit(self) -> None:
        while None in self._slots:
            submit = self._line.take(
                lambda s: admission.first_pages(s, self.limits) <= self.pool.free
            )
            if submit is None:
                return
            seq = Sequence(
                request=submit,
                slot=self._slots.index(None),
                pages=tuple(self.pool.alloc(admission.first_pages(submit, self.limits))),
                cuts=canonical_cuts(len(submit.tokens), self.limits.tiles),
            )
            self._slots[seq.slot] = self._live[submit.id] = seq
            self._turns.append(seq)
            self._fold(f"A {submit.id} {seq.slot} {_list(seq.pages)}")

    def _grow(self, events: list[Event]) -> None:
        """Extends reservations, oldest request first, so that it is the youngest who wait.

        If every sequence waits for a page and no output is outstanding that could end one, nothing
        would ever move again: the youngest is ended where it stands.
        """
        while True:
            stuck = True
            for id in sorted(self._live):
                seq = self._live[id]
                if self._starved(seq):
                    self._extend(seq)
                stuck &= self._starved(seq) and not seq.unread
            if not self._live or not stuck:
                return
            self._end(max(self._live), "length", events)

    def _extend(self, seq: Sequence) -> None:
        """Up to `window` more tokens; less than that rather than nothing."""
        prompt = len(seq.request.tokens)
        tokens = prompt + min(seq.planned + self.limits.window, seq.request.max_tokens)
        more = min(pages_for(tokens, self.limits.page_size) - len(seq.pages), self.pool.free)
        if more > 0:
            pages = self.pool.alloc(more)
            seq.pages += tuple(pages)
            self._fold(f"G {seq.request.id} {_list(pages)}")

    def _starved(self, seq: Sequence) -> bool:
        return seq.wants_row and not seq.covers_row(self.limits.page_size)

    # Choosing work.

    def _plan_rows(self) -> tuple[Row, ...]:
        rows = tuple(
            seq.next_row()
            for seq in self._slots
            if seq is not None and seq.wants_row and not self._starved(seq)
        )
        if rows:
            self._fold(f"D {_list(row.slot for row in rows)}")
        return rows

    def _plan_tiles(self, budget: int) -> tuple[Tile, ...]:
        tiles: list[Tile] = []
        while self._turns and len(tiles) < budget:
            seq = self._turns.popleft()
            tile = seq.next_tile()
            tiles.append(tile)
            self._fold(f"P {tile.request.id} {tile.start} {tile.size}")
            if seq.prefilling:
                self._turns.append(seq)
        return tuple(tiles)

    # Committing.

    def _take(self, seq: Sequence, item: Tile | Row, output: Output) -> Event | None:
        request = seq.request
        prompt: tuple[TokenLogprob, ...] = ()
        if isinstance(item, Tile):
            if request.prompt_logprobs is not None:
                seq.logprobs.extend(output.prompt_logprobs)
            if not item.last:
                return None
            prompt, seq.logprobs = tuple(seq.logprobs), []
            if not request.max_tokens:
                return self._finish(seq, Event(request.id, prompt_logprobs=prompt), "length")
        token = output.token
        if token is None or output.error is not None:
            # Only a slot that met its stop id is closed, and that would be known.
            event = Event(request.id, error=output.error or "the device returned no token")
            return self._finish(seq, event, "error")
        self._fold(f"T {request.id} {seq.committed} {token}")
        seq.committed += 1
        wanted = output.logprob if request.sampling.logprobs is not None else None
        event = Event(
            request.id,
            tokens=(token,),
            logprobs=(wanted,) if wanted else (),
            prompt_logprobs=prompt,
        )
        if token in request.stop_ids:
            return self._finish(seq, event, "stop")
        if seq.committed == request.max_tokens:
            return self._finish(seq, event, "length")
        return event

    def _finish(self, seq: Sequence, event: Event, reason: str) -> Event:
        self._leave(seq)
        self._ended += 1
        self._fold(f"F {seq.request.id} {reason}")
        return dataclasses.replace(event, finish=reason)

    def _fold(self, line: str) -> None:
        self._digest = fnv1a(line.encode() + b"\n", self._digest)
        if self.operations is not None:
            self.operations.append(line)


def _match(work: tuple[Tile | Row, ...], outputs: Outputs) -> None:
    if len(work) != len(outputs):
        raise ValueError(f"{len(outputs)} outputs for {len(work)} tiles and rows")
    for item, output in zip(work, outputs, strict=True):
        if item.slot != output.slot:
            raise ValueError(f"output of slot {output.slot} where slot {item.slot} was planned")
        if isinstance(item, Tile) and item.request.prompt_logprobs is not None:
            expected = item.length - item.last
            if len(output.prompt_logprobs) != expected:
                raise ValueError(
                    f"request {item.request.id}, tile at {item.start}:"
                    f" {len(output.prompt_logprobs)} prompt logprobs, not {expected}"
                )


def _list(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))
