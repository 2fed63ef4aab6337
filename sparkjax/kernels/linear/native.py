"""`linear` and `embed` in C++ on the CPU, over GGUF blocks as published or dense rows.

Sums are float32, in an order fixed by the weight's shape: a row has the same bits in any batch.
Weights are decoded exactly (block formats: ggml-common.h of llama.cpp); activations are not
quantized.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import native

# As in blocks.h: name or dtype -> (number, weights per block, bytes per block).
_KINDS = {
    "float32": (0, 1, 4),
    "bfloat16": (1, 1, 2),
    "Q4_0": (2, 32, 18),
    "Q4_1": (3, 32, 20),
    "Q8_0": (4, 32, 34),
}


def _stored(w: Any) -> tuple[jax.Array, str]:
    """The array that holds a weight, and the name of its kind."""
    if hasattr(w, "blocks"):
        return w.blocks, w.kind
    return w, str(w.dtype)


def _width(data: jax.Array, kind: str) -> int:
    """K, the weights in a row."""
    _, elements, size = _KINDS[kind]
    return data.shape[-1] if elements == 1 else data.shape[-1] // size * elements


def _weight_reason(w: Any) -> str | None:
    if not hasattr(w, "blocks") and not isinstance(w, (jax.Array, jax.ShapeDtypeStruct)):
        return f"no native decoding of {type(w).__name__}"
    data, kind = _stored(w)
    if kind not in _KINDS:
        return f"no native decoding of {kind}"
    if data.ndim not in (2, 3):
        return f"a weight of {data.ndim} axes; 2 or 3 are supported"
    if _KINDS[kind][1] > 1 and data.shape[-1] % _KINDS[kind][2]:
        return f"rows of {data.shape[-1]} bytes are no whole {kind} blocks"
    return None


def supports(x: Any, w: Any) -> str | None:
    """None if `linear` can take these, else the reason."""
    if x.dtype != jnp.float32:
        return f"activations of {x.dtype}; float32 is supported"
    return _weight_reason(w) or native.why_not()


def supports_embed(ids: Any, w: Any) -> str | None:
    """None if `embed` can take these, else the reason."""
    if ids.dtype != jnp.int32:
        return f"ids of {ids.dtype}; int32 is supported"
    reason = _weight_reason(w)
    if reason is None and _stored(w)[0].ndim != 2:
        return f"a table of {_stored(w)[0].ndim} axes; 2 are supported"
    return reason or native.why_not()


def _checked(w: Any, k: int, layer: Any) -> tuple[jax.Array, int]:
    reason = _weight_reason(w)
    if reason is not None:
        raise ValueError(f"linear: {reason}")
    data, kind = _stored(w)
    if _width(data, kind) != k:
        raise ValueError(f"linear: x has {k} columns, the weight {_width(data, kind)}")
    if data.ndim == 2:
        data = data[None]
    elif layer is None and data.shape[0] != 1:
        raise ValueError(f"linear: a weight of {data.shape[0]} layers needs `layer`")
    return data, _KINDS[kind][0]


def linear_group(
    x: jax.Array, weights: Sequence[Any], layer: Any = None, rows: jax.Array | None = None
) -> list[jax.Array]:
    """y_i[..., n] = sum_k x[..., k] W_i[layer, n, k]: several weights of one x in one call.

    Args:
      x: float32 [..., K].
      weights: each an object with `blocks` (uint8 [L, N, bytes] or [N, bytes]) and `kind` (Q4_0,
        Q4_1 or Q8_0), or a float32 or bfloat16 array [L, N, K] or [N, K]. N may differ.
      layer: int or int32 [], the index into L (clamped); may be None for a weight without an L
        axis, which ignores it.
      rows: int32 [], or None: the leading rows of x, flattened to [M, K], that are computed. The
        others are zeros in the result and cost nothing.

    Returns:
      float32 [..., N_i], one for each weight. A row's bits depend on nothing but the row and the
      weight.

    Raises:
      ValueError: another kind of weight, or another K.
      RuntimeError: the native library is not there.
    """
    native.require()
    if x.dtype != jnp.float32:
        raise ValueError(f"linear: x is {x.dtype}; float32 is supported")
    *lead, k = x.shape
    data, kinds = zip(*(_checked(w, k, layer) for w in weights), strict=True)
    flat = x.reshape(-1, k)
    m = flat.shape[0]
    call = jax.ffi.ffi_call(
        "sparkjax_linear", [jax.ShapeDtypeStruct((m, d.shape[1]), jnp.float32) for d in data]
    )
    results = call(
        flat,
        jnp.asarray(0 if layer is None else layer, jnp.int32),
        jnp.asarray(m if rows is None else rows, jnp.int32),
        *data,
        kinds=np.asarray(kinds, np.int64),
    )
    return [y.reshape(*lead, y.shape[-1]) for y in results]


def linear(x: jax.Array, w: Any, layer: Any = None, rows: jax.Array | None = None) -> jax.Array:
    """y[..., n] = sum_k x[..., k] W[layer, n, k]; arguments as in `linear_group`."""
    return linear_group(x, [w], layer, rows)[0]


def embed(ids: jax.Array, w: Any) -> jax.Array:
    """Rows `ids` of the table, decoded.

    Args:
      ids: int32 [...]; clamped to the table.
      w: a weight as in `linear_group`, without a layer axis: [N, K].

    Returns:
      float32 [..., K].

    Raises:
      ValueError: another kind of weight or of ids.
      RuntimeError: the native library is not there.
    """
    native.require()
    reason = supports_embed(ids, w)
    if reason is not None:
        raise ValueError(f"embed: {reason}")
    data, kind = _stored(w)
    flat = ids.reshape(-1)
    shape = jax.ShapeDtypeStruct((flat.shape[0], _width(data, kind)), jnp.float32)
    rows = jax.ffi.ffi_call("sparkjax_embed", shape)(flat, data, kind=np.int64(_KINDS[kind][0]))
    return rows.reshape(*ids.shape, rows.shape[-1])
