"""What a recipe needs and how fast it can be, on any machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import msgspec

from ..engine import memory
from ..engine.memory import GIB, Item, MemoryPlan
from ..engine.records import Limits
from ..manifests import Manifest
from ..mesh import gb10
from ..mesh.context import Context
from ..models import cache as caches
from . import cost, hlo
from .devices import Device
from .programs import Program, compiled
from .weights import abstract_weights

STREAMS = (1, 2, 4, 8)
PROMPTS = (2048, 8192, 32768)
DECODE_CONTEXT = 1024
"""Tokens that each stream holds in the decode figures."""
WORKSPACE = GIB
"""Assumed temporaries of the programs where they are not compiled."""
RUNTIME = GIB
"""What a process holds besides: the CUDA context, XLA, Python (assumed, not measured on a GB10)."""


@dataclasses.dataclass(frozen=True)
class Speed:
    """A projection of the model of time (see `plan.cost`).

    Attributes:
      seconds: of a decode step, or of a whole prompt.
      tokens_per_second: of all streams together, or of the prompt.
      parts: seconds by cause; `limit` is the largest.
    """

    seconds: float
    tokens_per_second: float
    parts: cost.Time
    limit: str


@dataclasses.dataclass(frozen=True)
class Report:
    """The plan of one published checkpoint over some ranks; figures are one rank's.

    Attributes:
      memory: the itemised table.
      pool_tokens: the largest engine.kv_tokens that fits, 0 where nothing does.
      token_bytes: bytes that are read for one token of one stream of DECODE_CONTEXT tokens.
      programs: compiled for the device; empty where no compiler is here (`note` says so).
      decode: projected, by number of streams. prefill: by prompt length in tokens.
    """

    model: str
    manifest: str
    device: Device
    ranks: int
    limits: Limits
    memory: MemoryPlan
    pool_tokens: int
    token_bytes: float
    programs: dict[str, Program]
    decode: dict[int, Speed]
    prefill: dict[int, Speed]
    note: str = ""

    @property
    def fits(self) -> bool:
        return self.memory.free >= 0

    @property
    def concurrency(self) -> int:
        """Sequences of the whole context that the largest pool holds."""
        return self.pool_tokens // self.limits.context


def plan(
    manifest: Manifest,
    limits: Limits,
    device: Device,
    ranks: int = 1,
    compile: bool = True,
    kernels: tuple[tuple[str, str], ...] = (),
    programs: Iterable[str] = ("advance", "choose", "tile"),
    mesh: Any | None = None,
) -> Report:
    """Sizes a published checkpoint over `ranks` devices.

    Args:
      limits: the engine's; they fix the programs' shapes.
      compile: compile for GB10; without it launches and collectives are not counted.
      programs: which ones to compile.
      mesh: devices to compile for (default: as many compile-only GB10s as ranks).
    """
    family, dtype = manifest.family, "bfloat16"
    config = family.read_config(manifest.config)
    tree = family.declare(config, ranks)
    weights = abstract_weights(manifest, tree, ranks, dtype)
    planes = family.declare_caches(config, ranks)
    work = cost.work(tree, weights, planes, manifest.config, ranks, dtype)
    found: dict[str, Program] = {}
    note = ""
    if compile:
        try:
            mesh = gb10.compile_only_mesh(ranks) if mesh is None else mesh
        except gb10.Unavailable as error:
            note = f"launches and collectives are not counted: {error}"
        else:
            context = Context(dtype=dtype, ranks=ranks, platform="cuda", kernels=kernels)
            found = compiled(
                family, config, tree, weights, limits, context, mesh, tuple(programs)
            )
    step = _together(found, "advance", "choose")
    tile = _together(found, "tile")
    decode = {
        streams: _speed(
            cost.decode_time(work, step, device, ranks, streams, DECODE_CONTEXT), streams
        )
        for streams in STREAMS
        if streams <= limits.slots
    }
    prefill = {
        tokens: _speed(
            cost.prefill_time(work, tile, device, ranks, tokens, limits.tiles[-1]), tokens
        )
        for tokens in PROMPTS
        if tokens <= limits.context
    }
    sizes = caches.Sizes(limits.pages, limits.page_size, limits.slots)
    fixed = [
        *memory.weight_items(tree, weights, ranks),
        *memory.slot_items(limits.slots, config.vocab),
        Item("workspace", "temporaries of the largest program", _workspace(found)),
        Item("programs", "compiled code", sum(p.code for p in found.values())),
        Item("runtime", "CUDA context, XLA, Python", RUNTIME),
        Item("reserve", "left to the system", memory.RESERVE),
    ]
    available = int(device.memory_gib * GIB)
    room = available - sum(item.nbytes for item in fixed)
    pool = memory.largest_pool(planes, limits.page_size, limits.slots, ranks, dtype, room)
    return Report(
        model=manifest.product,
        manifest=manifest.name,
        device=device,
        ranks=ranks,
        limits=limits,
        memory=MemoryPlan(
            (*fixed, *memory.cache_items(planes, sizes, ranks, dtype)), available
        ),
        pool_tokens=pool.tokens,
        token_bytes=work.bytes_at(1, DECODE_CONTEXT),
        programs=found,
        decode=decode,
        prefill=prefill,
        note=note,
    )


def _workspace(programs: dict[str, Program]) -> int:
    return max((p.temporaries for p in programs.values()), default=WORKSPACE)


def _together(programs: dict[str, Program], *names: str) -> hlo.Counts:
    """The counts of several programs run one after another (nothing where they are missing)."""
    total = hlo.NOTHING
    for name in names:
        if name in programs:
            total = total + programs[name].counts
    return total


def _speed(time: cost.Time, tokens: int) -> Speed:
    return Speed(time.total, tokens / time.total, time, time.limit)


def as_json(report: Report) -> dict[str, Any]:
    """The report as JSON values."""
    found = dataclasses.asdict(report) | {"limits": msgspec.to_builtins(report.limits)}
    found["programs"] = {
        name: {
            "launches": program.counts.total,
            "launches_at_most": program.most_launches,
            "launches_by_kind": dict(program.counts.launches),
            "collectives": [
                {"kind": kind, "bytes": size, "count": n}
                for (kind, size), n in program.counts.collectives.items()
            ],
            "host_calls": program.counts.host_calls,
            "argument_bytes": program.arguments,
            "temporary_bytes": program.temporaries,
            "code_bytes": program.code,
            "compile_seconds": round(program.compile_seconds, 1),
        }
        for name, program in report.programs.items()
    }
    found |= {
        "fits": report.fits,
        "total_bytes": report.memory.total,
        "free_bytes": report.memory.free,
        "concurrency": report.concurrency,
        "projected": True,
    }
    return found
