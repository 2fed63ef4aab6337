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

    def one(prefix: Any, spec: Any, path: Any, shape: Any) -> jax.Array:
        names = [str(getattr(k, "name", getattr(k, "key", k))) for k in (*prefix, *path)]
        own = spmd.share(spec, shape.shape, rank, ranks)
        starts = np.array([part.start for part in own], np.uint32)
        dims = tuple(part.stop - part.start for part in own)
        key = np.uint32(zlib.crc32(".".join(names).encode()) ^ seed)
        norm = any("norm" in name for name in names)
        return _values(names[-1], norm, shape.shape, dims, jnp.dtype(shape.dtype), starts, key)

    def below(prefix: Any, spec: Any, tree: Any) -> Any:
        return jax.tree_util.tree_map_with_path(functools.partial(one, prefix, spec), tree)

    if specs is None:
        return below((), PartitionSpec(), shapes)
    return jax.tree_util.tree_map_with_path(
        below, specs, shapes, is_leaf=lambda s: isinstance(s, PartitionSpec)
    )


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _values(
    name: str,
    norm: bool,
    whole: tuple[int, ...],
    dims: tuple[int, ...],
    dtype: Any,
    starts: jax.Array,
    key: jax.Array,
) -> jax.Array:
    if "scale" in name or name == "whole":
        if dtype == jnp.uint8:
            return jnp.full(dims, 120, dtype)  # an E8M0 byte: 2^-7
        return jnp.full(dims, 1.0 if name == "whole" else 2.0**-6, dtype)
    bits = _bits(whole, dims, starts, key)
    if jnp.issubdtype(dtype, jnp.integer):
        unsigned = jnp.dtype(f"uint{dtype.itemsize * 8}")
        if name == "packed" or dtype in (jnp.uint8, jnp.int8, jnp.uint16, jnp.int16, jnp.uint32):
            return jax.lax.bitcast_convert_type(bits.astype(unsigned), dtype)
        return jnp.zeros(dims, dtype)
    if dtype.itemsize == 1:
        # E4M3 without its two NaN codes.
        code = bits.astype(jnp.uint8)
        code = jnp.where((code & 0x7F) == 0x7F, jnp.uint8(0), code & jnp.uint8(0xBF))
        return jax.lax.bitcast_convert_type(code, dtype)
    small = ((bits & 0xFF).astype(jnp.float32) - 127.5) / 74.0
    if norm:
        return (1 + small / 16).astype(dtype)
    return (small / math.sqrt(max(whole[-1], 1) if whole else 1)).astype(dtype)


def _bits(
    whole: tuple[int, ...], dims: tuple[int, ...], starts: jax.Array, key: jax.Array
) -> jax.Array:
    """uint32 [dims]: MurmurHash3's last mixing of each place's number in the whole array."""
    place = jnp.zeros(dims, jnp.uint32)
    for axis in range(len(dims)):
        stride = math.prod(whole[axis + 1 :]) & 0xFFFFFFFF
        along = jax.lax.broadcasted_iota(jnp.uint32, dims, axis) + starts[axis]
        place = place + along * jnp.uint32(stride)
    x = place ^ (key * jnp.uint32(0x9E3779B1))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return x ^ (x >> 16)
