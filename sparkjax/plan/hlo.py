"""What a compiled program does: kernel launches, collectives, calls to the host.

Read off the optimised HLO text (`jax.stages.Compiled.as_text()`), whose `while` loops carry their
trip counts. One launch is one instruction outside of fusions that runs something on the device.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Callable

COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
# Instructions that move no data and launch nothing.
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional",
    "call", "partition-id", "replica-id", "after-all", "opt-barrier", "domain", "add-dependency",
}  # fmt: skip
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (.+?) ([a-z][\w\-]*)\(")
_TARGET = re.compile(r'custom_call_target="([^"]+)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_SHAPE = re.compile(r"\b(pred|[suf]\d+|bf16|f8\w+|f4\w+|c64)\[([\d,]*)\]")
_CALLED = {
    "while": re.compile(r"body=%?([\w.\-]+)"),
    "call": re.compile(r"to_apply=%?([\w.\-]+)"),
}
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TWO = re.compile(r"true_computation=%?([\w.\-]+), false_computation=%?([\w.\-]+)")
# Custom calls that are notes to the compiler.
_NOTES = {"Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "AllocateBuffer"}
_HOST = re.compile(r"callback|xla_ffi_python|host_call")


@dataclasses.dataclass(frozen=True)
class Counts:
    """What one run of a program does.

    Attributes:
      launches: device operations, by opcode (custom calls by their target).
      collectives: how many collectives of which result size in bytes: {(opcode, bytes): count}.
      host_calls: calls into the host's Python.
      unknown_trips: loops without a known trip count, counted once.
    """

    launches: collections.Counter[str]
    collectives: collections.Counter[tuple[str, int]]
    host_calls: int = 0
    unknown_trips: int = 0

    @property
    def total(self) -> int:
        return sum(self.launches.values())

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.launches + other.launches,
            self.collectives + other.collectives,
            self.host_calls + other.host_calls,
            self.unknown_trips + other.unknown_trips,
        )

    def times(self, n: int) -> Counts:
        def scaled(counter: collections.Counter) -> collections.Counter:
            return collections.Counter({key: value * n for key, value in counter.items()})

        return Counts(
            scaled(self.launches),
            scaled(self.collectives),
            self.host_calls * n,
            self.unknown_trips * n,
        )


NOTHING = Counts(collections.Counter(), collections.Counter())


def count(text: str, branch: Callable[..., Counts] = max) -> Counts:
    """The counts of an optimised HLO module's entry computation.

    Args:
      branch: `max` or `min`: of a conditional, the branch with most or fewest launches counts.

    Raises:
      ValueError: the text has no entry computation.
    """
    bodies: dict[str, list[str]] = {}
    entry, name = None, None
    for line in text.splitlines():
        if header := _HEADER.match(line):
            name = header[2]
            bodies[name] = []
            entry = name if header[1] else entry
        elif line.startswith("}"):
            name = None
        elif name is not None:
            bodies[name].append(line)
    if entry is None:
        raise ValueError("not an optimised HLO module: it has no ENTRY computation")
    known: dict[str, Counts] = {}

    def of(computation: str) -> Counts:
        if computation not in known:
            total = NOTHING
            for line in bodies.get(computation, []):
                total = total + _instruction(line, of, branch)
            known[computation] = total
        return known[computation]

    return of(entry)


def _instruction(
    line: str, of: Callable[[str], Counts], branch: Callable[..., Counts]
) -> Counts:
    match = _INSTRUCTION.match(line)
    if match is None:
        return NOTHING
    shape, opcode = match[1], match[2]
    if opcode == "while":
        body = _CALLED["while"].search(line)
        trips = _TRIPS.search(line)
        inner = of(body[1]) if body else NOTHING
        if trips is None:
            return dataclasses.replace(inner, unknown_trips=inner.unknown_trips + 1)
        return inner.times(int(trips[1]))
    if opcode == "call":
        called = _CALLED["call"].search(line)
        return of(called[1]) if called else NOTHING
    if opcode == "conditional":
        if (branches := _BRANCHES.search(line)) is not None:
            names = [b.strip().lstrip("%") for b in branches[1].split(",")]
        else:
            two = _TWO.search(line)
            names = [two[1], two[2]] if two else []
        return branch((of(n) for n in names), key=lambda c: c.total, default=NOTHING)
    base = opcode.removesuffix("-start")
    if opcode in _FREE or opcode.endswith(("-done", "-update")):
        return NOTHING
    collectives: collections.Counter[tuple[str, int]] = collections.Counter()
    if base in COLLECTIVES:
        collectives[base, _bytes(shape)] += 1
    label, host = base, 0
    if opcode == "custom-call":
        target = _TARGET.search(line)
        label = target[1] if target else opcode
        if label in _NOTES:
            return NOTHING
        host = int(bool(_HOST.search(label)))
    return Counts(collections.Counter({label: 1}), collectives, host)


def _bytes(shape: str) -> int:
    """Bytes of the largest array of a result shape (an async start returns its operands too)."""
    sizes = []
    for dtype, dims in _SHAPE.findall(shape):
        bits = 8 if dtype == "pred" or dtype.startswith("f8") else int(re.findall(r"\d+", dtype)[0])
        elements = math.prod(int(d) for d in dims.split(",")) if dims else 1
        sizes.append(elements * bits // 8)
    return max(sizes, default=0)
