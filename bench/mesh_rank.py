"""One rank of bench/mesh_gpus.py: python mesh_rank.py SPEC.json RANK. Takes orders on its standard
input and answers each with one line on its standard output, both JSON."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

import random_weights
import step
from mesh_gpus import CHAIN

from sparkjax.engine.engine import Engine
from sparkjax.engine.records import Sampling, Submit
from sparkjax.mesh import spmd
from sparkjax.mesh.context import RANKS
from sparkjax.mesh.world.roster import Address
from sparkjax.model import Model, here
from sparkjax.models import params as declarations
from sparkjax.plan import measure
from sparkjax.plan.devices import device
from sparkjax.plan.weights import abstract_weights


class Rank:
    """This process, in a world over one transport ("none" is a world of one)."""

    def __init__(self, spec: dict[str, Any], rank: int):
        self.transport, self.rank, self.ranks = spec["transport"], rank, spec["ranks"]
        self.mesh = self.shm = None
        self.model = self.engine = self.run = self.loops = self.long = None
        if self.transport == "shm":
            from sparkjax.mesh.transports.shm import Shm

            self.shm = Shm.open(
                spec["name"], rank, self.ranks, timeout=600, platform=here().platform
            )  # fmt: skip
        if self.transport == "xla":
            from sparkjax.ranks import meet, start_xla

            start_xla(Address("127.0.0.1", spec["port"]), rank, self.ranks, 120)
            meet(self.ranks)
            self.mesh = spmd.make_mesh(self.ranks)

    def joined(self, own: Any, spec: PartitionSpec, shape: tuple[int, ...]) -> Any:
        """The whole array that all ranks' shares make, where one program runs on all of them."""
        if self.mesh is None:
            return own
        sharding = NamedSharding(self.mesh, spec)
        return jax.make_array_from_single_device_arrays(shape, sharding, [own])

    def device(self) -> dict[str, Any]:
        """This device's constants for the plan's model of time."""
        base = device("h200")  # for what no step's time depends on
        return dataclasses.asdict(
            dataclasses.replace(
                base,
                kind=jax.local_devices()[0].device_kind,
                read_gb_s=round(measure.read_rate(4 << 30) / 1e9, 1),
                bf16_tflops=round(measure.matrix_rate() / 1e12, 2),
                launch_us=round(measure.launch_gap() * 1e6, 3),
                source="measured by bench/mesh_gpus.py: reads, bf16 products, launches",
            )
        )

    # --- Collectives ------------------------------------------------------------------------------

    def prepare(self, sizes: list[int], loop: int) -> dict[str, Any]:
        """Compiles and runs the programs of `collectives`."""
        context = dataclasses.replace(here("bfloat16", self.ranks), transport=self.shm)

        def reduce(x: jax.Array) -> jax.Array:
            return context.all_reduce(x) * jnp.bfloat16(1 / self.ranks)

        def gather(x: jax.Array) -> jax.Array:
            return context.all_gather(x, axis=0)[1:2] * jnp.bfloat16(0.5)

        kinds = {"all_reduce": reduce, "all_gather": gather}
        self.loops = {
            f"{name} {size}": self._loop(one, size, CHAIN * CHAIN)
            for size in sizes
            for name, one in kinds.items()
        }
        self.long = self._loop(reduce, 48 << 10, loop)
        for call in self.loops.values():
            jax.block_until_ready(call())
        return {}

    def collectives(self, rounds: int) -> dict[str, Any]:
        """Microseconds of a collective in a program of many, by kind and bytes of bfloat16; and the
        bits that a long loop leaves."""
        us = {
            name: round(_seconds(call, rounds) / (CHAIN * CHAIN) * 1e6, 2)
            for name, call in self.loops.items()
        }
        begun = time.perf_counter()
        out = np.asarray(self.long().addressable_data(0))
        loop = {
            "bits": hashlib.sha256(out.tobytes()).hexdigest(),
            "finite": bool(np.isfinite(out.astype(np.float32)).all()),
            "seconds": round(time.perf_counter() - begun, 2),
        }
        self.loops = self.long = None
        memory = None if self.shm is None else "GPUs'" if self.shm.direct else "host's"
        return {"us": us, "loop": loop, "memory": memory}

    def _loop(self, one: Any, size: int, count: int) -> Any:
        """A call of `count` collectives, each on what the last one left, in one program."""
        rng = np.random.default_rng(self.rank)
        own = jnp.asarray(rng.standard_normal((1, size // 2)), jnp.bfloat16)
        spec = PartitionSpec(RANKS)
        x = self.joined(own, spec, (self.ranks, size // 2))

        def body(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            for _ in range(CHAIN):
                x = one(x)
            return x, None

        def run(x: jax.Array) -> jax.Array:
            return jax.lax.scan(body, x, None, length=count // CHAIN)[0]

        program = jax.jit(spmd.spmd(run, self.mesh, spec, spec))
        return lambda: program(x)

    # --- Models -----------------------------------------------------------------------------------

    def load(
        self,
        model: str,
        layers: int | None,
        dtype: str,
        rows: int,
        room: int,
        pool: int,
        tile: int,
    ) -> dict[str, Any]:
        """Random weights, this rank's share of them; then every program is compiled and run."""
        self.model = self.engine = self.run = None  # frees the last one's memory
        begun = time.perf_counter()
        manifest = step.manifest_of(model, layers)
        family, config = manifest.family, manifest.family.read_config(manifest.config)
        tree = family.declare(config, self.ranks)
        if moved := [path for path, param in declarations.leaves(tree) if not _in_order(param)]:
            raise ValueError(f"{model} over {self.ranks} ranks: {moved[0]} does not divide")
        context = dataclasses.replace(here(dtype, self.ranks), transport=self.shm)
        shapes = abstract_weights(manifest, tree, self.ranks, dtype)
        specs = declarations.specs(tree, self.ranks)
        own = random_weights.fill(shapes, specs=specs, rank=self.rank, ranks=self.ranks)
        params = jax.tree.map(
            lambda spec, mine, whole: jax.tree.map(
                lambda a, s: self.joined(a, spec, s.shape), mine, whole
            ),
            specs, own, shapes,
            is_leaf=lambda s: isinstance(s, PartitionSpec),
        )  # fmt: skip
        self.model = Model(family, config, params, context, self.mesh)
        limits = step.limits_for(self.model, rows, room)
        pages = max(pool // limits.page_size, limits.pages)
        limits = msgspec.structs.replace(limits, tiles=(tile,), pages=pages)
        self.engine = Engine(self.model, limits)
        filled = time.perf_counter()
        self.engine.runner.warm()
        now = time.perf_counter()
        return {"fill_s": round(filled - begun, 1), "compile_s": round(now - filled, 1)}

    def check(self, steps: int, prompt: int, keep: int) -> dict[str, Any]:
        """Greedy answers to a few prompts: what each begins with, and the bits of all of it."""
        engine, vocab = self.engine, self.model.config.vocab
        rng = np.random.default_rng(7)
        submits = tuple(
            Submit(
                engine.new_id(),
                tuple(int(t) for t in rng.integers(0, vocab, prompt + at)),
                steps,
                Sampling(logprobs=2),
            )
            for at in range(engine.limits.slots)
        )
        bits = hashlib.sha256()
        begins: list[list[Any]] = [[] for _ in submits]
        events = engine.tick(submits)
        ticks = 1
        while True:
            for event in events:
                for entry in event.logprobs:
                    bits.update(np.int64(entry.token).tobytes())
                    bits.update(np.float32([entry.logprob, *(p for _, p in entry.top)]).tobytes())
                    best = [p for _, p in entry.top]
                    begins[event.id - submits[0].id].append(
                        [entry.token, entry.logprob, best[0] - best[1]]
                    )
            if engine.idle:
                break
            events = engine.tick()
            ticks += 1
        return {
            "bits": bits.hexdigest(),
            "digest": f"{engine.scheduler.digest:016x}",
            "ticks": ticks,
            "tokens": sum(map(len, begins)),
            "begins": [b[:keep] for b in begins],
        }

    def time(self, position: int, steps: int, rounds: int, tiles: int) -> dict[str, Any]:
        """Milliseconds of a decode step and of a prefill tile, a number a round."""
        limits = self.engine.limits
        run = self.run = step.Steps(
            self.model, limits.slots, position, limits, self.engine.runner.programs
        )
        run.run(2), run.prefill(2)
        decode = [run.run(steps) * 1e3 for _ in range(rounds)]
        prefill = [run.prefill(tiles) * 1e3 for _ in range(rounds)]
        return {
            "decode_ms": [round(t, 4) for t in decode],
            "tile_ms": [round(t, 4) for t in prefill],
        }

    def counts(self) -> dict[str, Any]:
        """What a decode step and a prefill tile launch, as `time` has run them."""
        run, self.run = self.run, None
        if self.rank and self.mesh is None:
            return {}  # the first rank's own programs are enough
        return {"decode": _plain(run.counts()), "tile": _plain(run.counts_of_tile())}

    def failure(self) -> str:
        """What ended a collective here."""
        return self.shm.failure if self.shm is not None else ""


def _in_order(param: declarations.Param) -> bool:
    return all(dim.units is None or dim.units.identity for dim in param.dims)


def _seconds(send: Any, rounds: int, count: int = 8) -> float:
    """Seconds of one of many programs sent one behind the other; all ranks send as many."""

    def timed(calls: int) -> float:
        begin = time.perf_counter()
        for _ in range(calls):
            last = send()
        jax.block_until_ready(last)
        return time.perf_counter() - begin

    return statistics.median((timed(2 * count) - timed(count)) / count for _ in range(rounds))


def _plain(counts: Any) -> dict[str, Any]:
    return {
        "launches": dict(counts.launches),
        "collectives": [[name, size, n] for (name, size), n in counts.collectives.items()],
    }


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    jax.config.update("jax_platforms", spec["platform"])
    jax.config.update("jax_compilation_cache_dir", spec["cache"])
    jax.config.update("jax_compilation_cache_max_size", 4 << 30)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints
    rank = Rank(spec, int(sys.argv[2]))
    answers.write("{}\n")
    answers.flush()
    for line in sys.stdin:
        order = json.loads(line)
        found = getattr(rank, order.pop("do"))(**order)
        if failure := rank.failure():
            raise RuntimeError(failure)
        answers.write(json.dumps(found) + "\n")
        answers.flush()
    os._exit(0)  # threads of a transport must not hold it


if __name__ == "__main__":
    main()
