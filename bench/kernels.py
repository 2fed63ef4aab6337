"""Kernels against their references, the device's own limits, and PyTorch's kernels.

    python bench/kernels.py [OPERATION ...] [--match TEXT ...] [--no-peers] [--jobs N] [--out FILE]

Every case runs in one program that goes through several sets of buffers, together larger than the
caches; such programs are sent one behind the other, and the time of a run is the slope between few
and many of them. In front of each comparison, freed memory is filled with NaN, so that what a kernel
leaves unwritten shows. The copy bandwidth and the bf16 matrix rate are measured in the same run; on a
device known to do better than what they come out at, nothing is published.

Tracing keeps one core busy, so `--jobs` processes share the cases: all compile at once, then one
measures at a time.

Prints a table on standard error and one JSON receipt. Exits 1 when a result is wrong or the device
unhealthy; a target that is missed is reported as such.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# PyTorch's kernels want some of the memory too. JAX reads this when it is imported.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

import receipts
from kernel_case import Case

HEALTHY = {"NVIDIA H200": (3.0e12, 350e12), "NVIDIA GB10": (2.0e11, 80e12)}
"""Device -> the least copy bandwidth (bytes/s) and bf16 matrix rate (FLOP/s) of a healthy one."""
ROTATE = 256 << 20
"""Bytes that the buffers of a case have together at least (several last-level caches)."""
MOST_COPIES = 32


def slope(send: Callable[[], Any], runs: int, rounds: int = 5) -> float:
    """Seconds of one run, `runs` of which are in each program that `send` starts: the median over
    rounds of the difference between 2 n and n programs, n so large that they take about 5 ms."""

    def timed(count: int) -> float:
        begin = time.perf_counter()
        last = None
        for _ in range(count):
            last = send()
        jax.block_until_ready(last)
        return time.perf_counter() - begin

    timed(2)
    n = max(2, min(200, int(5e-3 / max(timed(4) / 4, 1e-6))))
    return statistics.median((timed(2 * n) - timed(n)) / n for _ in range(rounds)) / runs


def copy_bandwidth(size: int = 1 << 30) -> float:
    """Bytes a second of a device copy, read plus written."""
    source = jnp.ones(size // 4, jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    return 2 * size / slope(lambda: copy(source), 1)


def matrix_rate(size: int = 8192, rows: int = 2048) -> float:
    """FLOP/s of XLA's bf16 product of [rows, size] and [size, size], random data."""
    key = jax.random.key(0)
    x = jax.random.normal(key, (rows, size), jnp.bfloat16)
    w = jax.random.normal(key, (size, size), jnp.bfloat16)
    product = jax.jit(lambda x, w: jax.lax.dot_general(x, w, (((1,), (1,)), ((), ()))))
    return 2 * rows * size * size / slope(lambda: product(x, w), 1)


def poison(shapes: Any) -> None:
    """Fills memory of the results' sizes with NaN and frees it, for the results to be put there."""
    leaves = [s for s in jax.tree.leaves(shapes) if jnp.issubdtype(s.dtype, jnp.floating)]
    filled = [jnp.full(s.shape, jnp.nan, s.dtype) for s in leaves for _ in range(2)]
    jax.block_until_ready(filled)
    for array in filled:
        array.delete()


def error(out: Any, reference: Any) -> float:
    """The largest norm(out - reference) / norm(reference) of all results; NaN never passes."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(out), jax.tree.leaves(reference), strict=True):
        a, b = (np.asarray(v.astype(jnp.float32), np.float64) for v in (a, b))
        relative = np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)
        worst = max(worst, relative) if np.isfinite(relative) else np.inf
    return float(worst)


@dataclasses.dataclass(frozen=True)
class Programs:
    """A case compiled: its arguments, one run, the reference, and a run of every set."""

    case: Case
    copies: int
    build: Any
    run: Any
    reference: Any
    many: Any

    @classmethod
    def compile(cls, case: Case) -> Programs:
        copies = max(2, min(MOST_COPIES, -(-ROTATE // max(case.bytes, 1))))
        key = jax.eval_shape(jax.random.key, 0)
        shapes = jax.eval_shape(case.build, key)
        run = jax.jit(case.run)
        # What is not timed needs no search among library kernels.
        cpu = jax.default_backend() == "cpu"
        quick = {} if cpu else {"xla_gpu_autotune_level": 0}
        # Flat, as nodes of a tree cost the host time in every call.
        leaves, structure = jax.tree.flatten([shapes] * copies)

        def many(*leaves: Any) -> list[Any]:
            return [run(*arguments) for arguments in jax.tree.unflatten(structure, leaves)]

        reference = None
        if case.reference is not None:
            reference = jax.jit(case.reference).lower(*shapes).compile(quick)
        build = jax.jit(case.build).lower(key).compile(quick)
        return cls(case, copies, build, run.lower(*shapes).compile(), reference,
                   jax.jit(many).lower(*leaves).compile())  # fmt: skip


def measure(
    programs: Programs, bandwidth: float, rate: float, clocks: float | None, torch: Any
) -> dict[str, Any]:
    """One case's part of the receipt."""
    case, copies = programs.case, programs.copies
    sets = [programs.build(jax.random.key(i)) for i in range(copies)]
    row: dict[str, Any] = {"operation": case.operation, "case": case.name, "bytes": case.bytes}
    if programs.reference is not None:
        poison(jax.eval_shape(case.run, *sets[-1]))
        row["error"] = error(programs.run(*sets[-1]), programs.reference(*sets[-1]))
        row["correct"] = bool(row["error"] <= case.tolerance)
    leaves = jax.tree.leaves(sets)
    seconds = slope(lambda: programs.many(*leaves), copies)
    row |= {
        "us": seconds * 1e6,
        "gb_s": case.bytes / seconds / 1e9,
        "of_copy": case.bytes / seconds / bandwidth,
        "tflop_s": case.flops / seconds / 1e12,
        "of_matrix": case.flops / seconds / rate,
    }
    if clocks:
        row["bytes_per_core_clock"] = case.bytes / seconds / clocks
    if case.target is not None:
        if case.bound == "flops":
            met = row["of_matrix"] >= case.target
        elif case.small:
            met = seconds <= 5e-6 + case.bytes / (case.target * bandwidth)
        else:
            met = row["of_copy"] >= case.target
        row |= {"met": bool(met), "target": case.target}
    if case.peer is not None and torch is not None:
        try:
            row["peer_us"] = torch_seconds(torch, case.peer(torch, copies)) * 1e6
        except (RuntimeError, AttributeError, ValueError) as failure:
            row["peer"] = str(failure).splitlines()[0]
    return row


def torch_seconds(torch: Any, calls: Sequence[Callable[[], Any]], rounds: int = 5) -> float:
    """Seconds of one of PyTorch's runs: a graph of all of them, replayed between two events."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    times, repeats = [], 10
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeats):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / repeats / len(calls))
    del kept
    return statistics.median(times)


def core_clocks() -> float | None:
    """Multiprocessors times their highest clock (1/s), where the driver tells them."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        mhz = pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM)
    except pynvml.NVMLError:
        return None
    return float(jax.devices()[0].core_count * mhz * 1e6)


def all_cases(operations: Sequence[str], match: Sequence[str]) -> list[Case]:
    """The cases of the modules in bench/cases, in order of their names; only those whose names contain
    one of `match`."""
    folder = Path(__file__).parent / "cases"
    names = sorted(p.stem for p in folder.glob("*.py") if not p.stem.startswith("_"))
    unknown = sorted(set(operations) - set(names))
    if unknown:
        sys.exit(f"no cases for {', '.join(unknown)}; there are: {', '.join(names)}")
    modules = [importlib.import_module(f"cases.{n}") for n in names if n in (operations or names)]
    found = [case for module in modules for case in module.cases()]
    return [case for case in found if any(text in case.name for text in match)]


def peers(wanted: bool) -> Any:
    """PyTorch, or None."""
    if not wanted:
        return None
    try:
        import torch
    except ImportError:
        return None
    return torch


def share(pipe: Any, operations: Sequence[str], match: Sequence[str], part: slice, with_peers: bool) -> None:
    """One process: compiles its part of the cases, says so, and measures them when told to."""
    compiled: list[tuple[Case, Programs | Exception]] = []
    for case in all_cases(operations, match)[part]:
        try:
            compiled.append((case, Programs.compile(case)))
        except Exception as failure:  # one case's failure is its own
            compiled.append((case, failure))
    torch = peers(with_peers)
    pipe.send(None)
    bandwidth, rate, clocks = pipe.recv()
    for case, programs in compiled:
        try:
            if isinstance(programs, Exception):
                raise programs
            row = measure(programs, bandwidth, rate, clocks, torch)
        except Exception as failure:
            row = {"operation": case.operation, "case": case.name, "correct": False,
                   "failure": f"{type(failure).__name__}: {str(failure)[:300]}"}  # fmt: skip
        pipe.send(row)
    pipe.send(None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("operations", nargs="*", help="as in bench/cases (all)")
    parser.add_argument("--match", nargs="+", default=[""], help="only cases whose names contain one")
    parser.add_argument("--no-peers", action="store_true", help="leave PyTorch out")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--out", type=Path, help="also write the receipt here, row by row")
    args = parser.parse_args()

    cases = all_cases(args.operations, args.match)
    jobs = min(args.jobs, len(cases)) or 1
    spawn = multiprocessing.get_context("spawn")
    pipes = []
    for job in range(jobs):
        here, there = spawn.Pipe()
        part = slice(job, None, jobs)
        given = (there, args.operations, args.match, part, not args.no_peers)
        spawn.Process(target=share, args=given, daemon=True).start()
        there.close()
        pipes.append(here)
    for pipe in pipes:
        # Compiling measures too (XLA's choice of library kernels): all of it comes first.
        pipe.recv()
    device = jax.devices()[0].device_kind
    bandwidth, rate, clocks = copy_bandwidth(), matrix_rate(), core_clocks()
    print(f"{device}: copy {bandwidth / 1e9:.0f} GB/s, bf16 {rate / 1e12:.0f} TFLOP/s",
          file=sys.stderr, flush=True)  # fmt: skip
    least = HEALTHY.get(device, (0.0, 0.0))
    if bandwidth < least[0] or rate < least[1]:
        sys.exit(f"{device} is not healthy: {least[0]:.3g} B/s and {least[1]:.3g} FLOP/s are usual")
    rows: list[dict[str, Any]] = []
    receipt = {
        "what": "kernels",
        "device": device,
        "copy_gb_s": bandwidth / 1e9,
        "bf16_tflop_s": rate / 1e12,
        "copy_bytes_per_core_clock": bandwidth / clocks if clocks else None,
        "cases": rows,
    }
    for pipe in pipes:
        pipe.send((bandwidth, rate, clocks))
        while (row := pipe.recv()) is not None:
            rows.append(row)
            print(line(row), file=sys.stderr, flush=True)
            if args.out:
                args.out.write_text(json.dumps(receipt, indent=1))
    receipt["copy_gb_s_after"] = copy_bandwidth() / 1e9
    order = {(c.operation, c.name): i for i, c in enumerate(cases)}
    rows.sort(key=lambda row: order[row["operation"], row["case"]])
    if args.out:
        args.out.write_text(json.dumps(receipt, indent=1))
    receipts.show(receipt)
    sys.exit(0 if all(row.get("correct", True) for row in rows) else 1)


def line(row: dict[str, Any]) -> str:
    """A case's row of the table."""
    head = f"{row['operation']:10} {row['case']:44}"
    if "failure" in row:
        return f"{head} FAILED {row['failure']}"
    wrong = "" if row.get("correct", True) else "  WRONG"
    error = f"{row['error']:8.1e}" if "error" in row else " " * 8
    peer = f" torch {row['peer_us']:8.1f} us" if "peer_us" in row else ""
    met = {True: " met", False: " MISSED"}.get(row.get("met"), "")
    return (f"{head} {row['us']:8.1f} us {row['gb_s']:6.0f} GB/s ({row['of_copy']:4.2f}) "
            f"{row['tflop_s']:6.1f} TFLOP/s ({row['of_matrix']:4.2f}) error {error}{peer}{met}{wrong}")  # fmt: skip


if __name__ == "__main__":
    main()
