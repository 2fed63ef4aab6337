"""Tensor parallelism over the GPUs of one host: collectives, steps, and whether ranks agree.

    python bench/mesh_gpus.py --ranks 2 --models llama3-70b:8 qwen3-8b glm-4.7-nvfp4:6 --out FOLDER
    python bench/mesh_gpus.py --platform cpu --tiny --out FOLDER

One process a rank, each with a GPU of its own (where there are fewer, ranks share them in turns and
only `shm` runs: NCCL refuses). Worlds of one rank, of N over `shm` and of N over `xla` stand side
by side; all load and compile together, then each is timed alone; every model has processes of its
own, since they keep the memory that they have had. Prints one JSON receipt and writes
it to FOLDER/mesh.json with a plot, FOLDER/mesh.svg. Exits 1 where ranks differ in a bit, operation
digests differ, or tokens differ from one rank's beyond near-ties.

A model is one of bench/step.py's, a manifest, or a folder with a config.json, and `:N` cuts it to
its first N layers. Weights are random, the same for any number of ranks.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

import plot
import receipts
import step

from sparkjax.plan import cost, hlo
from sparkjax.plan.devices import Device
from sparkjax.plan.devices import device as read_device
from sparkjax.plan.weights import abstract_weights

SIZES = [8 << 10, 48 << 10, 3 << 19, 16 << 20]
MARGIN = {"float32": 1e-3, "bfloat16": 0.1}
"""Two tokens whose log-probabilities are this close may change places with rounding; and those that
are closer than twice what rounding has moved a log-probability among tokens that agree."""
CHAIN = 8
"""Collectives written out in the body of a loop."""
KEEP = 64
"""Tokens of each answer that are compared with one rank's."""


TINY = {
    "dtype": "float32", "device": "gb10", "sizes": [8 << 10], "loop": 64, "rows": 4, "steps": 24,
    "prompt": 8, "position": 400, "tile": 64, "timed": 4, "rounds": 2, "pool": 4096,
}  # fmt: skip


class Ranks:
    """The processes of one world, which take orders together."""

    def __init__(self, args: argparse.Namespace, transport: str, ranks: int, folder: Path):
        self.transport, self.ranks = transport, ranks
        self.name = f"{transport}{ranks}"
        spec = {
            "transport": transport, "ranks": ranks, "platform": args.platform,
            "cache": str(args.cache), "name": f"sparkjax-{secrets.token_hex(8)}",
            "port": free_port(),
        }  # fmt: skip
        file = folder / f"{self.name}.json"
        file.write_text(json.dumps(spec))
        self.logs = [folder / f"{self.name}-{rank}.log" for rank in range(ranks)]
        self.processes = []
        for rank, log in enumerate(self.logs):
            environ = {
                **os.environ,
                "CUDA_VISIBLE_DEVICES": str(rank % max(args.gpus, 1)),
                "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
                # Multicast over NVLink may leave GPUs that other programs share out of service.
                "NCCL_NVLS_ENABLE": "0",
            }
            if args.xla_flags:
                environ["XLA_FLAGS"] = args.xla_flags
            if args.tiny:
                # As tests of worlds do, with whom the compiled programs are shared.
                environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
                environ["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"
            with log.open("w") as err:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, str(Path(__file__).parent / "mesh_rank.py"), file, str(rank)],
                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=err, text=True,
                        env=environ,
                    )
                )  # fmt: skip

    def order(self, what: str, **options: Any) -> None:
        for process in self.processes:
            process.stdin.write(json.dumps({"do": what, **options}) + "\n")
            process.stdin.flush()

    def answers(self) -> list[dict[str, Any]]:
        """Every rank's answer. Raises RuntimeError with the end of a rank's log."""
        found = []
        for process, log in zip(self.processes, self.logs, strict=True):
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"{self.name}: a rank ended\n{log.read_text()[-3000:]}")
            found.append(json.loads(line))
        return found

    def ask(self, what: str, **options: Any) -> list[dict[str, Any]]:
        self.order(what, **options)
        return self.answers()

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def free_port() -> int:
    """A port whose neighbour above is free, too."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as one:
            port = one.getsockname()[1]
            try:
                with socket.create_server(("127.0.0.1", port + 1)):
                    return port
            except OSError:
                continue


def say(what: str) -> None:
    print(f"{time.monotonic() - BEGUN:7.1f} s  {what}", file=sys.stderr, flush=True)


BEGUN = time.monotonic()


# --- What the ranks found -------------------------------------------------------------------------


def agreement(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Whether the ranks of one world did the same, to the bit."""
    return {
        "same_bits": len({f["bits"] for f in found}) == 1,
        "digests_equal": len({f["digest"] for f in found}) == 1,
        "digest": found[0]["digest"],
        "ticks": found[0]["ticks"],
        "tokens": found[0]["tokens"],
    }


def compare(one: list[list[Any]], several: list[list[Any]], margin: float) -> dict[str, Any]:
    """Answers against one rank's, each up to its first near-tie.

    Args:
      one, several: of each answer [token, its log-probability, lead over the second] a token.
    """
    gaps: list[float] = []
    leads = []
    for mine, theirs in zip(one, several, strict=True):
        for (a, p, lead), (b, q, _) in zip(mine, theirs, strict=False):
            if a != b:
                leads.append(lead)
                break
            gaps.append(abs(p - q))
    margin = max(margin, 2 * max(gaps, default=0.0))
    return {
        "equal_tokens": len(gaps),
        "of": sum(map(len, one)),
        "ended_by_near_tie": sum(lead < margin for lead in leads),
        "beyond_margin": sum(lead >= margin for lead in leads),
        "margin": round(margin, 5),
        "largest_lead_lost": round(max(leads, default=0.0), 5),
        "largest_logprob_gap": round(max(gaps, default=0.0), 5),
        "median_logprob_gap": round(statistics.median(gaps or [0.0]), 6),
    }


def with_collectives(device: Device, ranks: int, us: dict[str, float]) -> Device:
    """The device with what its collectives took: the smallest is latency, the largest a rate (one
    size alone leaves the rate as it is)."""
    sizes = sorted(int(k.split()[1]) for k in us if k.startswith("all_reduce "))
    small, large = sizes[0], sizes[-1]
    first, last = us[f"all_reduce {small}"], us[f"all_reduce {large}"]
    rate = device.collective_gb_s
    if large > small:
        rate = (large - small) / max(last - first, 1e-3) * 1e-3
    return Device(**{**vars(device), "collective_us": {ranks: first}, "collective_gb_s": rate})


def counts_of(plain: dict[str, Any]) -> hlo.Counts:
    return hlo.Counts(
        collections.Counter(plain["launches"]),
        collections.Counter({(name, size): n for name, size, n in plain["collectives"]}),
    )


def expected(
    model: tuple[str, int | None], ranks: int, device: Device, counts: dict[str, Any], args: Any
) -> dict[str, float]:
    """Milliseconds that `sparkjax plan`'s model of time gives for what was timed."""
    manifest = step.manifest_of(*model)
    family, config = manifest.family, manifest.family.read_config(manifest.config)
    tree = family.declare(config, ranks)
    weights = abstract_weights(manifest, tree, ranks, args.dtype)
    planes = family.declare_caches(config, ranks)
    work = cost.work(tree, weights, planes, manifest.config, ranks, args.dtype)
    decode = cost.decode_time(
        work, counts_of(counts["decode"]), device, ranks, args.rows, args.position
    )
    # A tile behind `position` tokens is the last tile of a prompt that is one tile longer.
    tile = counts_of(counts["tile"])
    longer, shorter = (
        cost.prefill_time(work, tile, device, ranks, args.position + more, args.tile).total
        for more in (args.tile, 0)
    )
    return {
        "decode_ms": round(decode.total * 1e3, 4),
        "decode_limit": decode.limit,
        "tile_ms": round((longer - shorter) * 1e3, 4),
    }


def panels(receipt: dict[str, Any]) -> list[plot.Panel]:
    """Measured and expected times over ranks, a panel a model and program."""
    found = []
    for name, worlds in receipt["models"].items():
        for what, title in (("decode_ms", "decode step"), ("tile_ms", "prefill tile")):
            lines = []
            transports = sorted({w["transport"] for w in worlds.values()} - {"none"})
            for colour, transport in enumerate(transports):
                own = [w for w in worlds.values() if w["transport"] in ("none", transport)]
                own.sort(key=lambda w: w["ranks"])
                for label, key, dash in (("", what, ""), (", planned", f"planned_{what}", "4 3")):
                    points = tuple((float(w["ranks"]), float(w[key])) for w in own)
                    lines.append(plot.Line(transport + label, points, colour, dash))
            found.append(plot.Panel(f"{name}: {title}", "ranks", "ms", tuple(lines)))
    return found


# --- The run --------------------------------------------------------------------------------------


def open_worlds(args: argparse.Namespace, worlds: list[Ranks], folder: Path) -> None:
    """Ends the processes of `worlds` and starts others in their places."""
    for world in worlds:
        world.end()
    worlds[:] = [Ranks(args, "none", 1, folder)]
    worlds += [
        Ranks(args, transport, ranks, folder)
        for ranks in args.ranks
        for transport in args.transports
    ]
    for world in worlds:
        world.answers()  # it is there
    say("all ranks are there")


def run(args: argparse.Namespace, worlds: list[Ranks], folder: Path) -> dict[str, Any]:
    open_worlds(args, worlds, folder)
    one = worlds[0]
    for world in worlds[1:]:
        world.order("prepare", sizes=args.sizes, loop=args.loop)
    constants = read_device(args.device) if args.device else Device(**one.ask("device")[0])
    say(f"device: {json.dumps(vars(constants))}")
    receipt: dict[str, Any] = {
        "what": f"tensor parallelism over {args.gpus} GPUs" if args.gpus else "dry run on a CPU",
        "ranks_share_gpus": 0 < args.gpus < max(args.ranks),
        "device": vars(constants),
        "collectives": {},
        "models": {},
    }
    for world in worlds[1:]:
        world.answers()
    for world in worlds[1:]:
        found = world.ask("collectives", rounds=args.rounds)
        loops = [f["loop"] for f in found]
        receipt["collectives"][world.name] = {
            "transport": world.transport,
            "ranks": world.ranks,
            "memory": found[0]["memory"],
            "us": found[0]["us"],
            "loop": {
                "reductions": args.loop // CHAIN * CHAIN,
                **loops[0],
                "same_bits": len({f["bits"] for f in loops}) == 1,
            },
        }
        say(f"{world.name}: {json.dumps(receipt['collectives'][world.name])}")
    for model in args.models:
        name, _, layers = model.partition(":")
        cut = (name, int(layers) if layers else None)
        load = {
            "model": cut[0], "layers": cut[1], "dtype": args.dtype, "rows": args.rows,
            "room": max(args.prompt + args.rows + args.steps, args.position + args.tile),
            "pool": args.pool, "tile": args.tile,
        }  # fmt: skip
        if receipt["models"]:
            open_worlds(args, worlds, folder)
        for world in worlds:
            world.order("load", **load)
        loaded = {world.name: world.answers()[0] for world in worlds}
        say(f"{model}: {json.dumps(loaded)}")
        receipt["models"][model] = rows = {}
        begins: list[list[Any]] = []
        for world in worlds:
            steps = args.steps if world.ranks > 1 else min(args.steps, KEEP)
            checked = world.ask("check", steps=steps, prompt=args.prompt, keep=KEEP)
            timed = world.ask(
                "time", position=args.position, steps=args.timed, rounds=args.rounds, tiles=4
            )[0]
            row = rows[world.name] = {
                "transport": world.transport, "ranks": world.ranks, **loaded[world.name],
                "decode_ms": statistics.median(timed["decode_ms"]),
                "decode_rounds_ms": timed["decode_ms"],
                "tile_ms": statistics.median(timed["tile_ms"]),
                "tile_rounds_ms": timed["tile_ms"],
                **agreement(checked),
            }  # fmt: skip
            if world.ranks == 1:
                begins = checked[0]["begins"]
            else:
                margin = MARGIN[args.dtype]
                row["tokens_of_one_rank"] = compare(begins, checked[0]["begins"], margin)
                alone = rows["none1"]
                row["decode_over_one_rank"] = round(row["decode_ms"] / alone["decode_ms"], 3)
                row["tile_over_one_rank"] = round(row["tile_ms"] / alone["tile_ms"], 3)
            say(f"{model} {world.name}: {json.dumps(row)}")
        for world in worlds:
            world.order("counts")
        for world in worlds:
            counts, device = world.answers()[0], constants
            if world.ranks > 1:
                us = receipt["collectives"][world.name]["us"]
                device = with_collectives(constants, world.ranks, us)
            rows[world.name]["launches"] = sum(counts["decode"]["launches"].values())
            planned = expected(cut, world.ranks, device, counts, args)
            rows[world.name] |= {f"planned_{key}": value for key, value in planned.items()}
            say(f"{model} {world.name}: {json.dumps(planned)}")
        if args.out is not None:
            keep(args.out, receipt)
    return receipt


def keep(folder: Path, receipt: dict[str, Any]) -> None:
    """Writes what there is so far."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mesh.json").write_text(json.dumps(receipt, indent=1))
    (folder / "mesh.svg").write_text(plot.svg(panels(receipt)))


def problems(receipt: dict[str, Any]) -> list[str]:
    """What does not hold, a line each."""
    found = []
    for name, world in receipt["collectives"].items():
        if not (world["loop"]["same_bits"] and world["loop"]["finite"]):
            found.append(f"{name}: the loop of reductions left other bits on another rank")
    for model, rows in receipt["models"].items():
        for name, row in rows.items():
            if not row["same_bits"]:
                found.append(f"{model} {name}: tokens or log-probabilities differ between ranks")
            if not row["digests_equal"]:
                found.append(f"{model} {name}: operation digests differ between ranks")
            if row.get("tokens_of_one_rank", {}).get("beyond_margin"):
                found.append(f"{model} {name}: tokens differ from one rank's beyond near-ties")
    return found


def main() -> None:
    golden = Path(__file__).parent.parent / "tests" / "golden"
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="e.g. 2 4")
    parser.add_argument("--platform", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--transports", nargs="+", default=["shm", "xla"])
    parser.add_argument("--models", nargs="+", default=["llama3-70b:8", "glm-4.7-nvfp4:6"])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes")
    parser.add_argument("--loop", type=int, default=10_000, help="reductions in one program")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--steps", type=int, default=1000, help="tokens of each answer")
    parser.add_argument("--prompt", type=int, default=48)
    parser.add_argument("--position", type=int, default=1024, help="tokens before what is timed")
    parser.add_argument("--tile", type=int, default=512)
    parser.add_argument("--timed", type=int, default=16, help="steps of one round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pool", type=int, default=0, help="tokens of the cache pool at least")
    parser.add_argument("--device", default=None, help="constants of this kind, none measured")
    parser.add_argument("--tiny", action="store_true", help="a dry run: golden models, few steps")
    parser.add_argument("--xla-flags", default="", help="XLA_FLAGS of every rank")
    parser.add_argument("--out", type=Path, default=None, help="folder of receipt and plot")
    parser.add_argument("--cache", type=Path, default=Path("/tmp/sparkjax-mesh-programs"))
    args = parser.parse_args()
    if args.tiny:
        vars(args).update(TINY)
        if args.models == parser.get_default("models"):
            args.models = [str(golden / "qwen3"), str(golden / "glm4_moe")]
    args.gpus = gpus() if args.platform == "cuda" else 0
    if args.platform == "cuda" and args.gpus < max(args.ranks):
        args.transports = ["shm"]
    jax.config.update("jax_platforms", "cpu")  # this process only counts
    with tempfile.TemporaryDirectory() as folder:
        worlds: list[Ranks] = []
        try:
            receipt = run(args, worlds, Path(folder))
        finally:
            for world in worlds:
                world.end()
    receipt["problems"] = problems(receipt)
    if args.out is not None:
        keep(args.out, receipt)
    receipts.show(receipt)
    sys.exit(1 if receipt["problems"] else 0)


def gpus() -> int:
    """GPUs of this machine."""
    done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())


if __name__ == "__main__":
    main()
