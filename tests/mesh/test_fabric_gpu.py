"""The fabric's GPU half: it compiles, and (on a GPU) its kernels and proxies carry collectives."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import jax
import pytest

from sparkjax.mesh.transports import build
from sparkjax.mesh.transports.fabric import native

HERE = Path(__file__).resolve().parent
KERNELS = Path(native.__file__).parent / "fabric.cu"


def compile_with(flags: tuple[str, ...], source: Path, to: Path) -> None:
    """Skips where nvcc is not installed."""
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not installed")
    command = [*flags, f"-I{jax.ffi.include_dir()}", str(source), "-o", str(to), "-lrt", "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_90", "sm_121a"])
def test_it_compiles(architecture: str, tmp_path: Path):
    compile_with(build.nvcc(architecture, *native.verbs_flags()), KERNELS, tmp_path / "fabric.so")


@pytest.mark.gpu
def test_two_ranks_of_one_gpu_reduce_in_replayed_graphs_without_rdma(tmp_path: Path):
    """Ten thousand captured reductions of each of two sizes, every collective before and after."""
    version = jax.devices("cuda")[0].compute_capability.replace(".", "")
    program = tmp_path / "fabric_streams"
    flags = ("nvcc", "-O3", "-std=c++17", f"-arch=sm_{version}")
    compile_with(flags, HERE / "fabric_streams.cu", program)
    done = subprocess.run(
        [program, "100"], capture_output=True, text=True, check=False, timeout=300
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    found = json.loads(done.stdout)
    assert (found["wrong"], found["reductions"], found["why"]) == (0, 20_000, "")
