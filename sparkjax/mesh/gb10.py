"""Compile-only GB10 devices: real programs for the real chip on a machine that has none.

Needs the `gb10` extra (jax-cuda13-plugin and jax-cuda13-pjrt of jax's own version, absl-py) and
CUDA's ptxas and libdevice. Seen working with jax 0.10.2, 0.11.2 and 0.12.0 and CUDA 13.0.
"""

from __future__ import annotations

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from .context import RANKS

# 48 SMs, 24 MiB L2, 99 KiB of shared memory a block, compute capability 12.1. Without
# feature_extension, Mosaic GPU emits sm_121a code for an sm_121 target and ptxas refuses it.
TARGET = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 101376
  shared_memory_per_core: 102400 threads_per_core_limit: 1536 core_count: 48
  fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: 273000000000 l2_cache_size: 25165824
  clock_rate_ghz: 2.4 device_memory_size: 128000000000
  cuda_compute_capability { major: 12 minor: 1 feature_extension: ACCELERATED_FEATURES }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
runtime_version { major: 13 minor: 0 patch: 0 }
device_description_str: "NVIDIA GB10"
"""


class Unavailable(RuntimeError):
    """GB10 programs cannot be compiled here; the message says what to install."""


def compile_only_mesh(boxes: int = 1) -> Mesh:
    """A mesh of `boxes` GB10s that programs can be compiled for, but not run on.

    Raises:
      Unavailable: the CUDA plugin is missing.
    """
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", topology_name="gb10", target_config=TARGET, topology=f"{boxes}x1x1"
        )
    except Exception as error:
        raise Unavailable(
            f"no CUDA compiler plugin for jax {jax.__version__}: pip install "
            f"jax-cuda13-plugin=={jax.__version__} jax-cuda13-pjrt=={jax.__version__} absl-py "
            f"({error})"
        ) from error
    return Mesh(np.array(topology.devices), (RANKS,))
