"""What to change when a recipe does not fit, or when none is given."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from ..engine.memory import GIB
from .report import Report

BOXES = (1, 2, 3, 4, 6)


@dataclasses.dataclass(frozen=True)
class Suggestion:
    """Settings that fit: the report of the plan with them, and how they read in a recipe."""

    settings: str
    report: Report


def shortfall(report: Report) -> str:
    """Why a plan is refused, in a sentence."""
    plan = report.memory
    return (
        f"{report.manifest} does not fit on {report.ranks} x {report.device.kind}: "
        f"{plan.total / GIB:.1f} GiB a rank of {plan.available / GIB:.1f}, "
        f"{-plan.free / GIB:.1f} GiB too much; the largest are {plan.largest()}"
    )


def nearest(
    report: Report, again: Callable[[int, int | None], Report], minimum: int | None = None
) -> list[Suggestion]:
    """The nearest settings that fit: a smaller pool on these boxes, and the fewest boxes that hold
    the recipe as it is. Each is planned again, and fits.

    Args:
      again: the plan for (ranks, kv_tokens; None is the recipe's own).
      minimum: tokens that a pool must hold to be worth naming (default: one sequence's context).
    """
    found = []
    minimum = min(report.limits.context, 8192) if minimum is None else minimum
    if report.pool_tokens >= minimum:
        smaller = again(report.ranks, report.pool_tokens)
        if smaller.fits:
            found.append(Suggestion(f"engine.kv_tokens: {report.pool_tokens}", smaller))
    for ranks in BOXES:
        if ranks > report.ranks:
            larger = again(ranks, None)
            if larger.fits:
                found.append(Suggestion(f"mesh.tensor_parallel: {ranks}", larger))
                break
    return found
