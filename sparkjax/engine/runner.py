"""From plans to device calls, and from device results to outputs: the "run" of the step."""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from ..mesh import spmd
from ..mesh.transports import TransportError
from ..models.cache import Sizes
from ..structured.grammars import Grammars
from ..structured.matcher import GrammarError
from . import programs
from .masks import Masks
from .plan import Output, Plan, Row, Tile, TokenLogprob
from .programs import HEADER, Programs, floats
from .records import Limits, Submit
from .sampler import TOP
from .state import State, empty_slots, settings


@dataclasses.dataclass
class Flight:
    """A dispatched plan: device arrays that will hold its results, in the plan's order.

    `outputs` are the results once they were read.
    """

    plan: Plan
    tiles: list[tuple[jax.Array, jax.Array]]
    rows: jax.Array | None
    outputs: list[Output] | None = None


class Runner:
    """Holds the device state and runs plans on it. Not thread-safe: the engine's thread only.

    Args:
      model: a `sparkjax.model.Model`.
      limits: the scheduler's limits; they fix every shape.
    """

    def __init__(self, model: Any, limits: Limits):
        self.model, self.limits = model, limits
        self.programs = Programs(model)
        self.sizes = Sizes(limits.pages, limits.page_size, limits.slots)
        self.width = -(-limits.context // limits.page_size)
        self.vocab = model.config.vocab
        # No grammar: every token is allowed. One resident mask a row count, never uploaded again.
        words = -(-self.vocab // 32)
        self._holders: dict[int, int] = {}
        # Families with tables on the host look tokens up in front of each step, so the host must
        # know them: prompt and output so far, by slot.
        self.waits = bool(model.tables)
        self._tokens: dict[int, list[int]] = {}
        self._made_grammars: Grammars | None = None
        self.masks = Masks(self.grammars, self.vocab)
        self._unread: deque[Flight] = deque()
        self._place = spmd.shardings(model.mesh, PartitionSpec())
        # Committed to the model's devices from the start: what a program returns is, and a program
        # compiled for uncommitted arguments would be compiled again.
        slots, self._open = jax.jit(
            lambda: (
                empty_slots(limits.slots, self.vocab),
                {n: jnp.full((n, words), 0xFFFFFFFF, jnp.uint32) for n in (1, *limits.rows)},
            ),
            out_shardings=self._place,
        )()
        self.state = State(model.new_caches(self.sizes), slots)

    # --- Start-up -------------------------------------------------------------------------------

    def warm(self, progress: Callable[[str, int, int], None] = lambda *_: None) -> None:
        """Compiles every program by running it on rows that touch nothing.

        Args:
          progress: called with (program, done, in all) before each one.
        """
        steps = list(self._warm_calls())
        for done, (name, call) in enumerate(steps):
            progress(name, done, len(steps))
            call()
            jax.block_until_ready(self.state)
        progress("ready", len(steps), len(steps))

    def _warm_calls(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        nobody = Submit(id=-1, tokens=(0,), max_tokens=0)
        if self.model.has_tokenizer:
            yield "grammars", self.grammars
        yield "seat", lambda: self._seat(0, nobody)
        for size in self.limits.tiles:
            # No valid token: nothing is written, but the program is the real one.
            tile = Tile(nobody, 0, 0, 0, size, False, ())
            yield f"prefill {size}", functools.partial(self._tile, tile)
        for size in self.limits.rows:
            yield f"decode {size}", functools.partial(self._rows, (), size)

    def grammars(self) -> Grammars:
        """What compiles grammars over the model's vocabulary.

        Raises:
          GrammarError: the model has no tokenizer, or no token that ends an answer.
        """
        if self._made_grammars is None:
            if not self.model.has_tokenizer:
                raise GrammarError("the model has no tokenizer, which a grammar needs")
            tokenizer = self.model.tokenizer
            ends = sorted({*tokenizer.eos_ids, *self.model.config.eos})
            self._made_grammars = Grammars.of(tokenizer, self.vocab, ends)
        return self._made_grammars

    # --- A tick ---------------------------------------------------------------------------------

    def run(self, plan: Plan) -> Flight:
        """Dispatches a plan's programs, tiles first; returns at once, unless rows have grammars:
        then the earlier plans' results are read while the device computes this one's rows."""
        tiles = []
        for tile in plan.tiles:
            if self._holders.get(tile.slot) != tile.request.id:
                self._seat(tile.slot, tile.request)
            tiles.append(self._tile(tile))
        rows = self._rows(plan.rows, plan.size) if plan.rows else None
        flight = Flight(plan, tiles, rows)
        self._unread.append(flight)
        return flight

    def collect(self, flight: Flight) -> list[Output]:
        """Waits for a plan's results and reads them: tiles, then rows. Plans are read in order."""
        while flight.outputs is None:
            first = self._unread.popleft()
            first.outputs = self._read(first)
        return flight.outputs

    def release(self, id: int) -> None:
        """A request ended."""
        self.masks.release(id)

    def _read(self, flight: Flight) -> list[Output]:
        outputs = [
            _tile_output(tile, np.asarray(packed), scores)
            for tile, (packed, scores) in zip(flight.plan.tiles, flight.tiles, strict=True)
        ]
        if flight.rows is not None:
            packed = np.asarray(flight.rows)
            outputs += [_row_output(row, packed[i]) for i, row in enumerate(flight.plan.rows)]
        transport = self.model.context.transport
        if transport is not None and transport.failure:  # a GPU's collectives cannot raise
            raise TransportError(transport.failure)
        if self.waits:
            for item, output in zip(flight.plan.work, outputs, strict=True):
                if output.token is not None and self._holders[item.slot] == item.request.id:
                    self._tokens[item.slot].append(output.token)
        return [self._judged(i, o) for i, o in zip(flight.plan.work, outputs, strict=True)]

    def _judged(self, item: Tile | Row, output: Output) -> Output:
        """Tells the request's grammar what was sampled."""
        if item.request.grammar is None or output.token is None:
            return output
        error = self.masks.take(item.request, output.token)
        return output if error is None else dataclasses.replace(output, error=error)

    def _seat(self, slot: int, request: Submit) -> None:
        self._holders[slot] = request.id
        self._tokens[slot] = list(request.tokens) if self.waits else []
        self.masks.begin(request)
        self.state = self.programs.seat(self.state, np.int32(slot), settings(request))

    def _tile(self, tile: Tile) -> tuple[jax.Array, jax.Array]:
        prompt = tile.request.tokens
        end = tile.start + tile.length
        tokens = np.zeros((1, tile.size), np.int32)
        targets = np.zeros((1, tile.size), np.int32)
        tokens[0, : tile.length] = prompt[tile.start : end]
        following = prompt[tile.start + 1 : end + 1]
        targets[0, : len(following)] = following
        emit = tile.last and tile.request.max_tokens > 0
        score = tile.request.prompt_logprobs is not None
        numbers = self._numbers(1)
        numbers[0, :HEADER] = tile.slot, tile.start, tile.length, emit, score
        numbers[0, HEADER : HEADER + len(tile.pages)] = tile.pages
        self.state, packed, scores = self.programs.tile(
            self.model.params,
            self.state,
            numbers,
            tokens,
            targets,
            self._on_device(self.masks.first(tile.request) if emit else None, 1),
            self._prelude([(tile.slot, tile.start, tile.length)], 1, tile.size),
        )
        return packed, scores

    def _rows(self, rows: tuple[Row, ...], size: int) -> jax.Array:
        numbers = self._numbers(size)
        for i, row in enumerate(rows):
            numbers[i, :HEADER] = row.slot, row.position, 1, 1, 0
            numbers[i, HEADER : HEADER + len(row.pages)] = row.pages
        prelude = self._prelude([(row.slot, row.position, 1) for row in rows], size, 1)
        params = self.model.params
        state, residual = self.programs.advance(params, self.state, numbers, prelude)
        mask = None
        if self.masks.needed(rows):
            if self._unread:
                self.collect(self._unread[-1])
            mask = self.masks.of(rows, size)
        slots, packed = self.programs.choose(
            params, state.slots, numbers, residual, self._on_device(mask, size)
        )
        self.state = State(state.caches, slots)
        return packed

    def _on_device(self, mask: np.ndarray | None, rows: int) -> jax.Array:
        # Placed as the resident ones are: a program knows its arguments by where they lie, too.
        return self._open[rows] if mask is None else jax.device_put(mask, self._place)

    def _prelude(self, spans: list[tuple[int, int, int]], rows: int, width: int) -> Any:
        """What the host looks up for (slot, start, count) spans, padded to `rows` by `width`."""
        if not self.waits:
            return None
        known = [
            (np.asarray(self._tokens[slot], np.int32), start, count) for slot, start, count in spans
        ]
        nothing = (np.zeros(1, np.int32), 0, 0)
        return self.model.prelude(known + [nothing] * (rows - len(known)), width)

    def _numbers(self, rows: int) -> np.ndarray:
        return np.zeros((rows, HEADER + self.width), np.int32)


def _tile_output(tile: Tile, packed: np.ndarray, scores: jax.Array) -> Output:
    prompt: tuple[TokenLogprob, ...] = ()
    wanted = tile.request.prompt_logprobs
    if wanted is not None:
        count = tile.length - tile.last
        table = np.asarray(scores)
        prompt = tuple(_logprob(table[i], wanted) for i in range(count))
    if not (tile.last and tile.request.max_tokens):
        return Output(tile.slot, None, None, prompt)
    return _sampled(tile, packed[0], prompt)


def _row_output(row: Row, packed: np.ndarray) -> Output:
    return _sampled(row, packed, ())


def _sampled(item: Tile | Row, packed: np.ndarray, prompt: tuple[TokenLogprob, ...]) -> Output:
    token = int(packed[programs.TOKEN])
    if token < 0:
        return Output(item.slot, None, None, prompt)
    wanted = item.request.sampling.logprobs
    return Output(item.slot, token, None if wanted is None else _logprob(packed, wanted), prompt)


def _logprob(packed: np.ndarray, count: int) -> TokenLogprob:
    ids = packed[programs.TOP_IDS : programs.TOP_IDS + count].tolist()
    values = floats(packed[programs.TOP_LOGPROBS : programs.TOP_LOGPROBS + min(count, TOP)])
    return TokenLogprob(
        int(packed[programs.TOKEN]),
        float(floats(packed[programs.LOGPROB : programs.LOGPROB + 1])[0]),
        tuple(zip(ids, values.tolist(), strict=True)),
    )
