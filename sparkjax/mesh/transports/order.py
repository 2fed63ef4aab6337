"""Reads a compiled program: are its collectives ours only, and do they stand in one order?

XLA may run calls that do not depend on one another at the same time and in either order, and two
ranks may choose differently. So in a program whose collectives are calls of ours, each must depend
on the one before.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from .shm import TARGET

FOREIGN = (
    "all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute",
    "collective-broadcast", "partition-id", "replica-id",
)  # fmt: skip
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (?:\([^=]*?\)|\S+) ([\w\-]+)\((.*)$")
_CALLED = re.compile(
    r"(?:to_apply|body|condition|calls|true_computation|false_computation|branch_computations|"
    r"called_computations)=(\{[^}]*\}|%?[\w.\-]+)"
)


def problems(text: str, target: str = TARGET) -> list[str]:
    """What is wrong with a program's HLO (`jit(f).lower(...).compile().as_text()`), a line each."""
    computations = dict(_computations(text))
    found = []
    ours: dict[str, bool] = {}

    def carries(name: str) -> bool:
        """Whether a computation has a collective of ours, at any depth."""
        if name not in ours:
            ours[name] = False
            ours[name] = any(_collective(i, target, carries) for i in computations.get(name, ()))
        return ours[name]

    for name, instructions in computations.items():
        before: dict[str, frozenset[str]] = {}
        last = None
        for instruction, opcode, operands, rest in instructions:
            if opcode.removesuffix("-start").removesuffix("-done") in FOREIGN:
                found.append(f"{name}: {instruction} is XLA's own {opcode}")
            depends = frozenset().union(*(before.get(o, frozenset()) | {o} for o in operands))
            before[instruction] = depends
            if _collective((instruction, opcode, operands, rest), target, carries):
                if last is not None and last not in depends:
                    found.append(f"{name}: {instruction} does not depend on {last}")
                last = instruction
    return found


def count(text: str, target: str = TARGET) -> int:
    """Collectives of ours in a program's text."""
    return text.count(f'custom_call_target="{target}"')


def _collective(instruction: tuple, target: str, carries) -> bool:
    _, opcode, _, rest = instruction
    if opcode == "custom-call":
        return f'"{target}"' in rest
    return any(carries(name) for name in _called(rest))


def _called(rest: str) -> Iterator[str]:
    for group in _CALLED.findall(rest):
        for name in group.strip("{}").split(","):
            yield name.strip().lstrip("%")


def _computations(text: str) -> Iterator[tuple[str, list[tuple[str, str, list[str], str]]]]:
    """(name, [(instruction, opcode, operands, the rest of its line)]) in the text's order, which is
    one in which operands come first."""
    name = ""
    body: list[tuple[str, str, list[str], str]] = []
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
        if line.endswith("{") and ") -> " in line and not line.startswith(" "):
            name, body = line.removeprefix("ENTRY ").split(" ", 1)[0].lstrip("%"), []
        elif line.startswith("}") and name:
            yield name, body
            name = ""
        elif name and (match := _INSTRUCTION.match(line)):
            instruction, opcode, rest = match.groups()
            operands = re.findall(r"%([\w.\-]+)", rest.split("), ")[0])
            body.append((instruction, opcode, operands, rest))
