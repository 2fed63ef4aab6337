"""Choosing an implementation of an operation.

Left unnamed, an operation takes the first of its implementations (fastest first) that supports
the arguments on the context's platform, else the reference. A named one that cannot run raises.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

from ..mesh.context import Context

log = logging.getLogger(__name__)
_told: set[tuple[str, str]] = set()


class KernelUnavailable(RuntimeError):
    """A kernel that was asked for by name cannot run these arguments here."""


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute an operation.

    Attributes:
      name: what `kernels.<operation>` in the configuration calls it.
      platform: "cpu" or "cuda".
      supports: arguments -> None, or why not.
      function: same signature as the operation's reference.
    """

    name: str
    platform: str
    supports: Callable[..., str | None]
    function: Callable[..., Any]


def choose(
    operation: str,
    context: Context,
    reference: Callable[..., Any],
    implementations: Sequence[Implementation],
    *args: Any,
) -> Callable[..., Any]:
    """The function to call for `args` (those that `supports` looks at)."""
    wanted = context.kernel(operation)
    if wanted == "reference":
        return reference
    for implementation in implementations:
        if wanted is not None and implementation.name != wanted:
            continue
        if implementation.platform != context.platform:
            reason: str | None = f"it is for {implementation.platform}"
        else:
            reason = implementation.supports(*args)
        if reason is None:
            return implementation.function
        if wanted is not None:
            raise KernelUnavailable(f"kernels.{operation}: {wanted} cannot run here: {reason}")
        if implementation.platform == context.platform and (operation, reason) not in _told:
            _told.add((operation, reason))
            log.info("%s: not using %s (%s)", operation, implementation.name, reason)
    if wanted is not None:
        names = ", ".join(["reference", *(i.name for i in implementations)])
        raise KernelUnavailable(f"kernels.{operation} is {wanted!r}; there are: {names}")
    return reference
