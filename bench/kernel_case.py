"""What a kernel benchmark is made of; `bench/kernels.py` runs the cases of `bench/cases/*.py`.

A module of `bench/cases` is named after its operation and has one function, `cases()`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Case:
    """One kernel at one size.

    Attributes:
      operation: the folder of sparkjax/kernels.
      name: unique within the operation: format, shape, rows.
      build: a random key -> the arguments, a pytree of device arrays. It is called once for each
        buffer that runs rotate through, inside of `jax.jit`.
      run: arguments -> result (array or tuple of arrays). Traced inside of `jax.jit`.
      reference: arguments -> the same result another way, or None where nothing is compared.
      bytes: what one run must move through device memory at least, each input read once.
      flops: what one run must compute at least (a multiply-add is two).
      target: the least share of the run's measured bound that is wanted: of copy bandwidth where
        `bound` is "bytes", of the bf16 matrix rate where it is "flops".
      tolerance: the largest norm(out - reference) / norm(reference).
      peer: torch, count -> that many callables, each one run of PyTorch's own kernel for the same
        work on buffers of its own; None where there is none.
      small: whether one run moves less than 64 MB: then its time may be
        5 us + bytes / (target * bandwidth).
    """

    operation: str
    name: str
    build: Callable[[jax.Array], Any]
    run: Callable[..., Any]
    reference: Callable[..., Any] | None
    bytes: int
    flops: int = 0
    target: float | None = None
    bound: str = "bytes"
    tolerance: float = 2e-3
    peer: Callable[[Any, int], list[Callable[[], Any]]] | None = None

    @property
    def small(self) -> bool:
        return self.bytes < 64e6
