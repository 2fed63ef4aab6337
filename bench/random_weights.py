"""Random packed weights of a published checkpoint's real shapes, and the same model cut short."""

from __future__ import annotations

import copy
import math
from typing import Any

import jax
import jax.numpy as jnp

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
            if (isinstance(value, list) and len(value) == whole) or (isinstance(value, list) and key in PER_LAYER and len(value) > layers):
                section[key] = value[:layers]
    return values


def fill(shapes: Any, seed: int = 0) -> Any:
    """Arrays of these shapes: codes are random bits, scales sane, everything else small numbers."""

    def one(path: Any, shape: Any) -> jax.Array:
        nonlocal seed
        seed += 1
        key = jax.random.key(seed)
        name = str(getattr(path[-1], "name", getattr(path[-1], "key", path[-1])))
        return jax.jit(lambda key: _values(name, shape, key))(key)

    return jax.tree_util.tree_map_with_path(one, shapes)


def _values(name: str, shape: Any, key: jax.Array) -> jax.Array:
    dims, dtype = shape.shape, jnp.dtype(shape.dtype)
    if name in ("scale", "whole") or "scale" in name:
        if dtype == jnp.uint8:
            return jnp.full(dims, 120, dtype)  # an E8M0 byte: 2^-7
        return jnp.full(dims, 1.0 if name == "whole" else 2.0**-6, dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        if dtype in (jnp.uint8, jnp.int8, jnp.uint16, jnp.int16, jnp.uint32):
            return jax.random.bits(key, dims, jnp.dtype(f"uint{dtype.itemsize * 8}")).view(dtype)
        if name == "packed":
            return jax.random.bits(key, dims, jnp.uint32).view(jnp.int32)
        return jnp.zeros(dims, dtype)
    if dtype.itemsize == 1:
        # E4M3 without its two NaN codes.
        bits = jax.random.bits(key, dims, jnp.uint8)
        return jnp.where((bits & 0x7F) == 0x7F, jnp.uint8(0), bits & jnp.uint8(0xBF)).view(dtype)
    # Drawn in slices: a whole stack in float32 may not fit.
    fan_in = max(dims[-1], 1) if dims else 1
    bits = jax.random.bits(key, dims, jnp.uint8).astype(jnp.bfloat16)
    return ((bits - 127.5) / (74.0 * math.sqrt(fan_in))).astype(dtype)
