"""What XLA is told before it starts, so that a row's bits do not depend on its company."""

from __future__ import annotations

import importlib.metadata
import os
import platform

FLAG = "xla_cpu_max_isa"
CONTRACTS_BY_SHAPE = (0, 12)
"""The first jax whose CPU compiler rounds a product and a sum once in some shapes and twice in others."""


def settle_arithmetic() -> None:
    """On x86 such a jax makes code for AVX, which has no fused multiply-add, so that every shape
    rounds twice. The kernels that do most of the work are compiled apart and keep the whole
    instruction set. A choice that was made already stays; nothing changes once JAX has computed."""
    flags = os.environ.get("XLA_FLAGS", "")
    if platform.machine() == "x86_64" and _jax() >= CONTRACTS_BY_SHAPE and FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --{FLAG}=AVX".strip()


def _jax() -> tuple[int, ...]:
    major, minor = importlib.metadata.version("jax").split(".")[:2]
    return int(major), int(minor)
