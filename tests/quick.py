"""Compiling in half the time that production takes, for tests and the processes they start.

Most of the suite's time is compiling. Without most optimisations, XLA's older code for fusions
compiles in two thirds of the newer one's time; with them it takes twice as long. It ends with
jax 0.10, and later versions do not start with a flag that they do not know.
"""

from __future__ import annotations

import jax

ENVIRON = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_DEFAULT_MATMUL_PRECISION": "highest"}
if jax.__version_info__ < (0, 11):
    ENVIRON["XLA_FLAGS"] = "--xla_cpu_use_fusion_emitters=false"
