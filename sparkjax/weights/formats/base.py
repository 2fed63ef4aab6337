"""What every quantized format offers, so that operations need not know which one they hold."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


class QuantizedTensor:
    """A weight that stays in its published bytes. Formats are pytree nodes derived from this.

    A stacked tensor has leading axes (layers, experts) that index like those of an array; the
    last two axes of the logical shape are [N, K]: N outputs, K inputs.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape [..., N, K]."""
        raise NotImplementedError

    @property
    def ndim(self) -> int:
        """Number of logical axes."""
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        """The dtype of the weights as numbers."""
        return jnp.dtype(jnp.float32)

    def dequantize(self, layer: Any = None, dtype: Any = jnp.float32) -> jax.Array:
        """All weights, or those at index `layer` of the leading axes, as numbers."""
        raise NotImplementedError

    def take_rows(self, ids: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
        """Rows of a 2-D tensor as numbers [*ids.shape, K]; ids out of range are clamped."""
        raise NotImplementedError
