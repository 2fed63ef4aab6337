"""Bfloat16 runs lie as near to the float32 golden as the reference's own; what they hang on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from driver import GOLDEN

from sparkjax.models.layers.mlp import ACTIVATIONS
from sparkjax.models.layers.rope import Rope, angles, rotate_half, rotate_interleaved
from sparkjax.verify import verify


@pytest.mark.parametrize(
    "family",
    ["flint", *(pytest.param(f, marks=pytest.mark.slow) for f in ("glm4_moe", "mimo_v2_flash", "mimo_v2"))],
)
def test_bfloat16_is_as_near_as_the_reference(family):
    assert not [line for line in verify(GOLDEN / family, dtype="bfloat16").lines if line.ok is False]


@pytest.mark.parametrize("turn", [rotate_half, rotate_interleaved])
def test_rope_rounds_once(turn):
    x = jax.random.normal(jax.random.key(0), (2, 7, 3, 20)).astype(jnp.bfloat16)
    rope = angles(Rope(12, 100.0), jnp.arange(14).reshape(2, 7) * 50)
    exact = turn(x.astype(jnp.float32), *rope)
    assert turn(x, *rope).dtype == jnp.bfloat16
    assert np.array_equal(turn(x, *rope), exact.astype(jnp.bfloat16))


def test_silu_rounds_once():
    x = jnp.linspace(-9, 9, 4001).astype(jnp.bfloat16)
    exact = jax.nn.silu(x.astype(jnp.float32)).astype(jnp.bfloat16)
    assert np.array_equal(ACTIVATIONS["silu"](x), exact)
