"""One rank of a shared memory world, for test_shm.py: python shm_ranks.py NAME RANK RANKS MODE."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np

from sparkjax.mesh.context import Context
from sparkjax.mesh.transports.shm import Shm

PLATFORM = os.environ.get("SHM_PLATFORM", "cpu")
jax.config.update("jax_platforms", PLATFORM)


def payload(rank: int, shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    """What a rank brings: wide in exponent, so that the order of a sum shows in its bits."""
    rng = np.random.default_rng([seed, rank])
    x = rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 4, shape)
    return np.asarray(jnp.asarray(x, jnp.float32).astype(dtype))


SHAPES = [((1,), "float32"), ((3, 5), "bfloat16"), ((130, 64), "float32"), ((4097,), "bfloat16"),
          ((2, 0), "float32"), ((70_001,), "float32")]  # fmt: skip


def digest(*arrays: jax.Array) -> str:
    state = hashlib.sha256()
    for a in arrays:
        state.update(np.asarray(a).tobytes())
    return state.hexdigest()


def numbers(context: Context, rank: int, ranks: int) -> dict[str, str]:
    """Every collective over every shape, in one program each."""
    found = {}
    for at, (shape, dtype) in enumerate(SHAPES):
        x = payload(rank, shape, dtype, at)
        found[f"reduce {at}"] = digest(jax.jit(context.all_reduce)(x))
        found[f"gather {at}"] = digest(jax.jit(lambda x: context.all_gather(x, axis=0))(x))
        found[f"broadcast {at}"] = digest(jax.jit(lambda x: context.broadcast(x, ranks - 1))(x))
        parts = np.stack([payload(rank * 100 + to, shape, dtype, at) for to in range(ranks)])
        found[f"exchange {at}"] = digest(jax.jit(context.all_to_all)(parts))
    return found


def scan(context: Context, rank: int) -> str:
    """A collective in a loop: the same call site many times in one program."""

    def body(x, _):
        return context.all_reduce(x * 0.4) + 0.01, None

    run = jax.jit(lambda x: jax.lax.scan(body, x, None, length=300)[0])
    x = run(jnp.full(257, 1.0 + rank))
    for _ in range(3):
        x = run(x)
    return digest(x)


def main() -> None:
    name, rank, ranks, mode = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    shm = Shm.open(
        name, rank, ranks, timeout=20.0 if mode == "numbers" else 1.5, join=60.0,
        slot_bytes=1 << 14, epoch=0xFFFFFF00, platform=PLATFORM,
    )  # fmt: skip
    context = Context(ranks=ranks, transport=shm)
    if mode == "numbers":
        print(json.dumps({**numbers(context, rank, ranks), "scan": scan(context, rank)}))
        return
    reduce = jax.jit(context.all_reduce)
    reduce(jnp.ones(4)).block_until_ready()
    print("joined", flush=True)
    sys.stdin.readline()
    if mode == "stop" and rank == ranks - 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        if mode == "kind" and rank == 1:
            jax.jit(context.all_gather)(jnp.ones(4)).block_until_ready()
        elif mode == "parallel":

            def both(x):
                y = context.all_reduce(jnp.sin(x)).sum()
                return y + context.all_reduce(jnp.cos(x)).sum()

            for _ in range(50):
                jax.jit(both)(jnp.ones((64, 64))).block_until_ready()
        else:
            reduce(jnp.ones(4)).block_until_ready()
        print(shm.failure or "no error")  # on a GPU a step is asked for its failure
    except Exception:
        print(shm.failure)


if __name__ == "__main__":
    main()
