"""A machine with JAX's CUDA plugin and without NVIDIA's driver, as the `gb10` extra makes one.

There the plugin can compile and nothing else, and JAX prints its failure to start at every import.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys

PLUGIN = "xla_cuda13"
DRIVER = "libcuda.so.1"


def settle_platform() -> None:
    """Where there is the plugin and no driver, JAX computes on the CPU without trying CUDA first.

    A choice that was made already (JAX_PLATFORMS, jax.config) stays."""
    if not _plugin() or _driver():
        return
    if "jax" not in sys.modules:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        return
    import jax

    if not jax.config.values["jax_platforms"]:
        jax.config.update("jax_platforms", "cpu")


def _plugin() -> bool:
    try:
        return importlib.util.find_spec(f"jax_plugins.{PLUGIN}") is not None
    except ModuleNotFoundError:
        return False


def _driver() -> bool:
    try:
        ctypes.CDLL(DRIVER)
    except OSError:
        return False
    return True
