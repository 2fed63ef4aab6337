"""Random packed weights of a published checkpoint's real shapes, and the same model cut short.

A number depends on its place in the whole parameter alone, so each rank makes its own share, and the
shares of any number of ranks are the whole's slices.
"""

from __future__ import annotations

import copy
import functools
import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from sparkjax.mesh import spmd

PER_LAYER = ("layer_types", "compress_ratios", "mlp_layer_types", "hybrid_layer_pattern")


def shortened(values: dict[str, Any], layers: int) -> dict[str, Any]:
    """config.json values with only the first `layers` layers; lists with an entry a layer are cut
    along."""
    values = copy.deepcopy(values)
    for section in (values, values.get("text_config", {})):
        whole = section.get("num_hidden_layers")
        if whole is None or whole <= layers:
            continue
        section["num_hidden_layers"] = layers
        for key, value in section.items():
            if (isinstance(value, list) and len(value) == whole) or (
                isinstance(value, list) and key in PER_LAYER and len(value) > layers
            ):
                section[key] = value[:layers]
    return values


def fill(shapes: Any, seed: int = 0, specs: Any = None, rank: int = 0, ranks: int = 1) -> Any:
    """Arrays of these shapes: codes are random bits, scales sane, norms near 1, everything else
    small numbers.

    Args:
      shapes: of whole parameters (arrays, or quantized nodes of shapes).
      specs: where each parameter is sharded (`params.specs`); None is nowhere.

    Returns:
      One rank's shares.
    """

    # On a CPU numpy makes them, with nothing to compile.
    make = _on_host if jax.default_backend() == "cpu" else _on_device

    def one(prefix: Any, spec: Any, path: Any, shape: Any) -> jax.Array:
        names = [str(getattr(k, "name", getattr(k, "key", k))) for k in (*prefix, *path)]
        own = spmd.share(spec, shape.shape, rank, ranks)
        starts = np.array([part.start for part in own], np.uint32)
        dims = tuple(part.stop - part.start for part in own)
        key = np.uint32(zlib.crc32(".".join(names).encode()) ^ seed)
        norm = any("norm" in name for name in names)
        return make(names[-1], norm, shape.shape, dims, jnp.dtype(shape.dtype), starts, key)

    def below(prefix: Any, spec: Any, tree: Any) -> Any:
        return jax.tree_util.tree_map_with_path(functools.partial(one, prefix, spec), tree)

    if specs is None:
        return below((), PartitionSpec(), shapes)
    return jax.tree_util.tree_map_with_path(
        below, specs, shapes, is_leaf=lambda s: isinstance(s, PartitionSpec)
    )


def _values(
    xp: Any,
    name: str,
    norm: bool,
    whole: tuple[int, ...],
    dims: tuple[int, ...],
    dtype: Any,
    starts: Any,
    key: Any,
) -> Any:
    """One share; `xp` is numpy or jax.numpy."""
    if "scale" in name or name == "whole":
        if dtype == jnp.uint8:
            return xp.full(dims, 120, dtype)  # an E8M0 byte: 2^-7
        return xp.full(dims, 1.0 if name == "whole" else 2.0**-6, dtype)
    bits = _bits(xp, whole, dims, starts, key)
    if jnp.issubdtype(dtype, jnp.integer):
        unsigned = jnp.dtype(f"uint{dtype.itemsize * 8}")
        if name == "packed" or dtype in (jnp.uint8, jnp.int8, jnp.uint16, jnp.int16, jnp.uint32):
            return bits.astype(unsigned).view(dtype)
        return xp.zeros(dims, dtype)
    if dtype.itemsize == 1:
        # E4M3 without its two NaN codes.
        code = bits.astype(np.uint8)
        return xp.where((code & 0x7F) == 0x7F, np.uint8(0), code & np.uint8(0xBF)).view(dtype)
    small = ((bits & 0xFF).astype(np.float32) - np.float32(127.5)) / np.float32(74.0)
    if norm:
        return (1 + small / 16).astype(dtype)
    width = np.float32(math.sqrt(max(whole[-1], 1) if whole else 1))
    return (small / width).astype(dtype)


_on_device = jax.jit(functools.partial(_values, jnp), static_argnums=(0, 1, 2, 3, 4))


def _on_host(*args: Any) -> jax.Array:
    return jnp.asarray(_values(np, *args))


def _bits(xp: Any, whole: tuple[int, ...], dims: tuple[int, ...], starts: Any, key: Any) -> Any:
    """uint32 [dims]: MurmurHash3's last mixing of each place's number in the whole array."""
    place = xp.zeros(dims, np.uint32)
    for axis, size in enumerate(dims):
        stride = np.uint32(math.prod(whole[axis + 1 :]) & 0xFFFFFFFF)
        along = (xp.arange(size, dtype=np.uint32) + starts[axis]) * stride
        place = place + along.reshape((-1, *(1,) * (len(dims) - axis - 1)))
    x = place ^ (xp.asarray(key).reshape(1) * np.uint32(0x9E3779B1))[0]
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> shift)) * np.uint32(factor)
    return x ^ (x >> 16)
