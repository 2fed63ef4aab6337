"""The recipe's real programs, compiled for the device kind on a machine that has none of it."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from ..engine.records import Limits
from ..mesh.context import Context
from ..models import params as declarations
from . import abstract, hlo


@dataclasses.dataclass(frozen=True)
class Program:
    """One compiled program of a rank.

    Attributes:
      name: of the engine's program.
      counts: its launches and collectives. Of a conditional, the cheaper branch: what a greedy
        request runs.
      most_launches: those of the costlier branches: of a request that uses every option.
      arguments, temporaries, code: bytes by the compiler's own analysis.
      compile_seconds: how long compiling took here.
    """

    name: str
    counts: hlo.Counts
    most_launches: int
    arguments: int
    temporaries: int
    code: int
    compile_seconds: float


def compiled(
    family: Any,
    config: Any,
    tree: declarations.Tree,
    weights: Any,
    limits: Limits,
    context: Context,
    mesh: Any,
    names: tuple[str, ...] = ("advance", "choose", "tile"),
) -> dict[str, Program]:
    """The engine's programs by name, compiled for the mesh's devices.

    Args:
      weights: shapes from `plan.weights.abstract_weights`.
      mesh: devices to compile for; they may be compile-only.
    """
    model = abstract.model_of(family, config, tree, weights, context, mesh)
    lowered = abstract.lower(model, limits, mesh)
    found = {}
    for name in names:
        began = time.monotonic()
        program = getattr(lowered, name).compile()
        memory, text = program.memory_analysis(), program.as_text()
        found[name] = Program(
            name,
            hlo.count(text, branch=min),
            hlo.count(text, branch=max).total,
            memory.argument_size_in_bytes,
            memory.temp_size_in_bytes,
            memory.generated_code_size_in_bytes,
            time.monotonic() - began,
        )
    return found
