"""Rotary position embeddings (Su et al. 2021) and their published variants."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from ..config import ConfigReader


@dataclasses.dataclass(frozen=True)
class Rope:
    """Frequencies of one rotary embedding.

    Attributes:
      dim: how many channels rotate (an even number; they form dim / 2 pairs).
      theta: the base.
      variant: "default", "linear", "llama3" or "yarn".
      factor: context extension factor of the variants.
      original: the context length that the model was trained at (llama3, yarn).
      low, high: llama3's low_freq_factor and high_freq_factor; yarn's beta_slow and beta_fast.
      attention_factor: what cos and sin are multiplied by (yarn).
      truncate: round yarn's band edges to whole channels.
    """

    dim: int
    theta: float
    variant: str = "default"
    factor: float = 1.0
    original: int = 0
    low: float = 1.0
    high: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True

    def frequencies(self) -> np.ndarray:
        """float32 [dim / 2]: radians a position for every pair."""
        pairs = np.arange(0, self.dim, 2, dtype=np.float32)
        base = (1.0 / np.power(np.float32(self.theta), pairs / np.float32(self.dim))).astype(
            np.float32
        )
        match self.variant:
            case "default":
                return base
            case "linear":
                return (base / np.float32(self.factor)).astype(np.float32)
            case "llama3":
                return self._llama3(base)
            case "yarn":
                return self._yarn(base)
        raise ValueError(f"rope variant {self.variant!r} is not known")

    def _llama3(self, base: np.ndarray) -> np.ndarray:
        wavelength = 2 * np.pi / base
        smooth = (self.original / wavelength - self.low) / (self.high - self.low)
        blend = (1 - smooth) * base / self.factor + smooth * base
        scaled = np.where(wavelength > self.original / self.low, base / self.factor, blend)
        return np.where(wavelength < self.original / self.high, base, scaled).astype(np.float32)

    def _yarn(self, base: np.ndarray) -> np.ndarray:
        def edge(rotations: float) -> float:
            return (self.dim * math.log(self.original / (rotations * 2 * math.pi))) / (
                2 * math.log(self.theta)
            )

        low, high = edge(self.high), edge(self.low)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        span = high - low if high != low else 0.001
        ramp = np.clip((np.arange(self.dim // 2, dtype=np.float32) - low) / span, 0, 1)
        ramp = ramp.astype(np.float32)
        return (base / np.float32(self.factor) * ramp + base * (1 - ramp)).astype(np.float32)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """0.1 * mscale * ln(factor) + 1 (Peng et al. 2023)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def read_rope(reader: ConfigReader, dim: int, label: str | None = None) -> Rope:
    """The rotary settings of a config.json, new style (`rope_parameters`, nested by layer type
    when `label` is given) or old (`rope_theta`, `rope_scaling`)."""
    new = reader.section("rope_parameters")
    # Read here and not where it is nested by label: as the published implementation does.
    outer = new or reader.section("rope_scaling") or reader
    truncate = outer.read("truncate", bool, True)
    if new is not None and label is not None and new.has(label):
        new = new.section(label)
    old = reader.section("rope_scaling")
    source = new if new is not None else old
    theta = None
    if new is not None:
        theta = new.read("rope_theta", float, None)
    if theta is None:
        theta = reader.read("rope_theta", float, 10000.0)
    if source is None:
        return Rope(dim, theta)
    variant = source.read("rope_type", str, None) or source.read("type", str, "default")
    if variant == "default":
        return Rope(dim, theta)
    if variant not in ("linear", "llama3", "yarn"):
        raise source.refuse("rope_type", variant, "default, linear, llama3 or yarn")
    factor = source.read("factor", float)
    if variant == "linear":
        return Rope(dim, theta, "linear", factor)
    original = source.read("original_max_position_embeddings", int, None)
    if original is None:
        original = reader.read("max_position_embeddings", int)
    if variant == "llama3":
        low = source.read("low_freq_factor", float)
        high = source.read("high_freq_factor", float)
        return Rope(dim, theta, "llama3", factor, original, low, high)
    attention = source.read("attention_factor", float, None)
    if attention is None:
        m, m_all = source.read("mscale", float, None), source.read("mscale_all_dim", float, None)
        attention = (
            yarn_mscale(factor, m) / yarn_mscale(factor, m_all) if m and m_all else yarn_mscale(factor)
        )
    return Rope(
        dim,
        theta,
        "yarn",
        factor,
        original,
        low=source.read("beta_slow", float, None) or 1.0,
        high=source.read("beta_fast", float, None) or 32.0,
        attention_factor=attention,
        truncate=truncate,
    )


def angles(rope: Rope, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(cos, sin), float32 [..., dim / 2], at int32 positions [...]."""
    phase = positions.astype(jnp.float32)[..., None] * jnp.asarray(rope.frequencies())
    scale = jnp.float32(rope.attention_factor)
    return jnp.cos(phase) * scale, jnp.sin(phase) * scale


def rotate_half(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the first 2 * cos.shape[-1] channels of x, pairing channel i with i + dim / 2.

    Args:
      x: [..., heads, D].
      cos, sin: float32 [..., dim / 2], without the head axis; the turn is in float32, rounded
        once to x's dtype.
    """
    half = cos.shape[-1]
    cos, sin = cos[..., None, :], sin[..., None, :]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = [
        (first * cos - second * sin).astype(x.dtype),
        (second * cos + first * sin).astype(x.dtype),
    ]
    return jnp.concatenate([*turned, rest] if rest.shape[-1] else turned, axis=-1)


def rotate_interleaved(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the first 2 * cos.shape[-1] channels of x, pairing channel 2i with 2i + 1; in
    float32, rounded once."""
    dim = 2 * cos.shape[-1]
    cos, sin = cos[..., None, :], sin[..., None, :]
    even, odd, rest = x[..., 0:dim:2], x[..., 1:dim:2], x[..., dim:]
    turned = jnp.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1)
    turned = turned.reshape(*x.shape[:-1], dim).astype(x.dtype)
    return jnp.concatenate([turned, rest], axis=-1) if rest.shape[-1] else turned
