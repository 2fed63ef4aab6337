"""Measuring a device's constants for the model of time: `sparkjax bench device`."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import yaml

from ..engine.memory import GIB, available
from .devices import Device


def _seconds(send: Callable[[], Any], rounds: int = 7) -> float:
    """Seconds of one of many programs sent one behind the other: the median over rounds of the
    difference between twice as many and as many."""

    def timed(count: int) -> float:
        begin = time.perf_counter()
        last = None
        for _ in range(count):
            last = send()
        jax.block_until_ready(last)
        return time.perf_counter() - begin

    timed(2)
    count = max(2, min(64, int(20e-3 / max(timed(2) / 2, 1e-6))))
    return statistics.median((timed(2 * count) - timed(count)) / count for _ in range(rounds))


def read_rate(nbytes: int) -> float:
    """Bytes a second at which the device reads `nbytes` of memory (a sum over words)."""
    words = jax.random.bits(jax.random.key(0), (nbytes // 4,), jnp.uint32)
    total = jax.jit(lambda x: jnp.sum(x.reshape(-1, 8192), axis=1, dtype=jnp.uint32))
    return nbytes / _seconds(lambda: total(words))


def matrix_rate(dtype: Any = jnp.bfloat16, rows: int = 2048, width: int = 8192) -> float:
    """Operations a second of [rows, width] times [width, width] in `dtype`, random numbers."""
    key = jax.random.key(0)
    x = jax.random.normal(key, (rows, width)).astype(dtype)
    w = jax.random.normal(key, (width, width)).astype(dtype)

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.dot_general(
            x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        ).astype(jnp.bfloat16)

    run = jax.jit(product)
    return 2 * rows * width * width / _seconds(lambda: run(x, w))


def launch_gap(count: int = 64) -> float:
    """Seconds that one more dependent small kernel takes in a program: what a launch costs when
    its work is nothing."""
    weight = jnp.eye(128, dtype=jnp.bfloat16)

    def chain(length: int) -> Callable[[jax.Array], jax.Array]:
        def run(x: jax.Array) -> jax.Array:
            for _ in range(length):
                x = x @ weight
            return x

        return jax.jit(run)

    x = jnp.ones((16, 128), jnp.bfloat16)
    long, short = chain(2 * count), chain(count)
    return (_seconds(lambda: long(x)) - _seconds(lambda: short(x))) / count


def measure(base: Device | None = None) -> Device:
    """The constants of this process's first device. What one device cannot show (collectives) is
    taken from `base`."""
    device = jax.devices()[0]
    room = available(device)
    size = min(4 * GIB, max(room // 8, 1 << 28))
    small = device.platform == "cpu"
    # A CPU would take minutes for the size that fills a GPU.
    bf16 = matrix_rate(rows=128, width=512) if small else matrix_rate()
    return Device(
        kind=device.device_kind,
        memory_gib=round(room / GIB, 1),
        read_gb_s=round(read_rate(1 << 28 if small else size) / 1e9, 1),
        bf16_tflops=round(bf16 / 1e12, 2),
        fp8_tflops=round((bf16 if small else matrix_rate(jnp.float8_e4m3fn)) / 1e12, 2),
        launch_us=round(launch_gap() * 1e6, 3),
        collective_us=dict(base.collective_us) if base else {2: 30.0},
        collective_gb_s=base.collective_gb_s if base else 11.0,
        source="measured by `sparkjax bench device`; collectives are the file's own",
    )


def write(device: Device, path: Path) -> None:
    """Writes a device file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(dataclasses.asdict(device), sort_keys=False))
