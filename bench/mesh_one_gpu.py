"""What a collective of `shm` takes on one GPU, by one process that plays both ranks on two streams.

    python bench/mesh_one_gpu.py --sizes 8192 49152 1572864

Processes that share a GPU have it in turns, which shows what is right but not what is fast. Here two
streams of one process run at the same time, each replaying captured graphs of 100 collectives (CUDA
graphs are what XLA's command buffers are). Results are compared with the host's, bit by bit, after
10,000 reductions, too. Needs nvcc. Prints one JSON receipt; exits 1 where a result is wrong.
"""

from __future__ import annotations

import argparse
import json
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

import jax

sys.path.insert(0, str(Path(__file__).parent))

import receipts

SOURCE = Path(__file__).parent / "shm_streams.cu"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[8 << 10, 48 << 10, 3 << 19])
    parser.add_argument("--arch", default="native", help="of nvcc: native, sm_90, sm_121")
    parser.add_argument("--compile-only", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "shm_streams"
        flags = ["-O3", "-w", "-std=c++17", f"-arch={args.arch}", f"-I{jax.ffi.include_dir()}"]
        subprocess.run(["nvcc", *flags, SOURCE, "-o", program, "-lrt"], check=True)
        if args.compile_only:
            return
        name = f"/sparkjax-{secrets.token_hex(8)}"
        command = [program, name, *map(str, args.sizes)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=120)
    found = json.loads(done.stdout) if done.returncode == 0 else {"said": done.stdout}
    receipts.show({"what": "shm collectives of two ranks on two streams of one GPU", **found})
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
