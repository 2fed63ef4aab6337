"""A model whose tokens are a hash of the prompt and the position, and the device that runs it."""

from __future__ import annotations

import zlib

from sparkjax.engine.plan import Event, Output, Plan, Tile, TokenLogprob
from sparkjax.engine.records import Limits, Submit, Tick
from sparkjax.engine.scheduler import Scheduler
from sparkjax.engine.sequence import canonical_cuts

VOCAB = 17


def token_at(prompt: tuple[int, ...], position: int) -> int:
    return zlib.crc32(repr((prompt, position)).encode()) % VOCAB


def logprob_at(prompt: tuple[int, ...], position: int) -> float:
    return -float(zlib.crc32(repr((prompt, position, "logprob")).encode()) % 1000) / 100


def prompt_logprobs(prompt: tuple[int, ...]) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(prompt[i], logprob_at(prompt, i)) for i in range(1, len(prompt)))


def alone(request: Submit) -> tuple[tuple[int, ...], str]:
    """All tokens and the finish reason of a request that nothing disturbs."""
    tokens = []
    for step in range(request.max_tokens):
        tokens.append(token_at(request.tokens, len(request.tokens) + step))
        if tokens[-1] in request.stop_ids:
            return tuple(tokens), "stop"
    return tuple(tokens), "length"


class Device:
    """Runs plans in order and checks that they make sense: every tile and row continues what its
    slot holds, and every page it touches holds what its sequence wrote there."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self.slots: dict[int, dict] = {}
        self.cells: dict[tuple[int, int], tuple[int, int]] = {}  # (page, offset) -> (id, position)

    def run(self, plan: Plan) -> list[Output]:
        outputs = [self._tile(tile) for tile in plan.tiles]
        return outputs + [self._row(row) for row in plan.rows]

    def _write(self, item, start: int, length: int) -> None:
        size = self.limits.page_size
        for position in range(start, start + length):
            self.cells[item.pages[position // size], position % size] = (item.request.id, position)
        for position in range(start + length):
            cell = self.cells[item.pages[position // size], position % size]
            assert cell == (item.request.id, position)

    def _tile(self, tile: Tile) -> Output:
        request = tile.request
        if tile.start == 0:
            self.slots[tile.slot] = {"id": request.id, "length": 0, "dead": False, "tokens": []}
        state = self.slots[tile.slot]
        assert state["id"] == request.id and state["length"] == tile.start
        self._write(tile, tile.start, tile.length)
        state["length"] += tile.length
        logprobs: tuple[TokenLogprob, ...] = ()
        if request.prompt_logprobs is not None:
            logprobs = prompt_logprobs(request.tokens)[tile.start : tile.start + tile.length]
        token = None
        if tile.last and request.max_tokens:
            token = self._sample(state, request)
        return Output(tile.slot, token, prompt_logprobs=logprobs)

    def _row(self, row) -> Output:
        state = self.slots[row.slot]
        assert state["id"] == row.request.id
        if state["dead"]:
            return Output(row.slot, None)
        assert row.position == state["length"] and row.step == len(state["tokens"])
        assert row.position < self.limits.context
        self._write(row, row.position, 1)
        state["length"] += 1
        return Output(row.slot, self._sample(state, row.request))

    def _sample(self, state: dict, request: Submit) -> int:
        token = token_at(request.tokens, state["length"])
        state["tokens"].append(token)
        state["dead"] = token in request.stop_ids
        return token


class World:
    """A scheduler with its device. Keeps `depth` ticks in flight before it commits, checks every
    plan against the limits, and collects events by request."""

    def __init__(self, limits: Limits, depth: int = 1):
        self.limits, self.depth = limits, depth
        self.scheduler = Scheduler(limits)
        self.device = Device(limits)
        self.number = 0
        self.ticks: list[Tick] = []
        self.plans: list[Plan] = []
        self.outputs: dict[int, list[Output]] = {}
        self.tokens: dict[int, tuple[int, ...]] = {}
        self.finish: dict[int, Event] = {}
        self.finished_at: dict[int, int] = {}

    def tick(self, submits=(), cancels=(), stops=()) -> Plan:
        tick = Tick(
            self.number, tuple(submits), tuple(cancels), tuple(stops), self.scheduler.digest
        )
        return self.replay(tick)

    def replay(self, tick: Tick) -> Plan:
        self.ticks.append(tick)
        plan = self.scheduler.schedule(tick)
        self.number = tick.number + 1
        self.plans.append(plan)
        self._check(plan)
        self.outputs[plan.number] = self.device.run(plan)
        while len(self.scheduler.in_flight) > (0 if plan.empty else self.depth):
            self.commit()
        self.scheduler.check()
        return plan

    def commit(self) -> None:
        number = self.scheduler.in_flight[0]
        events = self.scheduler.commit(number, self.outputs.pop(number))
        assert len({event.id for event in events}) == len(events)
        for event in events:
            assert event.id not in self.finish, "an event after the last one"
            self.tokens[event.id] = self.tokens.get(event.id, ()) + event.tokens
            if event.finish is not None:
                self.finish[event.id] = event
                self.finished_at[event.id] = number

    def drain(self, most: int = 10_000) -> None:
        """Ticks without input until idle."""
        while not self.scheduler.idle:
            self.tick()
            most -= 1
            assert most, "the scheduler spins"

    def _check(self, plan: Plan) -> None:
        limits = self.limits
        assert len(plan.tiles) <= (limits.busy_tiles if plan.rows else limits.idle_tiles)
        slots = [row.slot for row in plan.rows]
        assert slots == sorted(set(slots))
        if slots:
            assert plan.size == min(size for size in limits.rows if size >= len(slots))
        else:
            assert plan.size == 0
        assert not set(slots) & {tile.slot for tile in plan.tiles}
        for tile in plan.tiles:
            cuts = canonical_cuts(len(tile.request.tokens), limits.tiles)
            cut = next(cut for cut in cuts if cut.start == tile.start)
            assert (cut.length, cut.size) == (tile.length, tile.size)
            assert tile.last == (cut == cuts[-1])
        for row in plan.rows:
            assert 1 <= row.step < row.request.max_tokens
            assert row.position == len(row.request.tokens) + row.step - 1
