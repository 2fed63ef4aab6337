"""The jnp reference of the short convolution."""

from __future__ import annotations

import jax
import jax.numpy as jnp

ACTIVATIONS = {"silu": jax.nn.silu, "none": lambda x: x}


def short_conv(
    x: jax.Array,
    tail: jax.Array,
    weight: jax.Array,
    *,
    dilation: int = 1,
    activation: str = "silu",
) -> jax.Array:
    """y[b, t, c] = act(sum_j w[c, j] z[b, t + j * dilation, c]) with z = [tail | x] along time.

    The last tap (j = W - 1) reads the token itself. Taps are added in order in float32, so a
    row's result depends on nothing but its own inputs.

    Args:
      x: [B, Q, C], the new inputs.
      tail: [B, (W - 1) * dilation, C], the inputs just before them (zeros before the sequence).
      weight: [C, W].
      activation: "silu" or "none".

    Returns:
      [B, Q, C] in x's dtype.
    """
    width, count = weight.shape[-1], x.shape[1]
    if tail.shape[1] != (width - 1) * dilation:
        raise ValueError(
            f"a convolution of width {width} and dilation {dilation} needs {(width - 1) * dilation} "
            f"earlier inputs, got {tail.shape[1]}"
        )
    z = jnp.concatenate([tail.astype(jnp.float32), x.astype(jnp.float32)], axis=1)
    taps = weight.astype(jnp.float32)
    y = z[:, :count] * taps[:, 0]
    for j in range(1, width):
        y = y + z[:, j * dilation : j * dilation + count] * taps[:, j]
    return ACTIVATIONS[activation](y).astype(x.dtype)
