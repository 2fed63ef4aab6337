"""Projections side by side as `kernels/linear` over the packed weight, for decode.

A block of threads takes outputs of one group, and that group's inputs. With more rows the reference
decodes the weight once for all of them.
"""

from __future__ import annotations

import math
from typing import Any

import jax

from .. import pallas as tools
from ..linear import triton as linear
from ..linear import tuning
from ..linear.planes import Spec, planes_of, spec_of


def supports(x: Any, w: Any) -> str | None:
    """None if `grouped` can take these, else the reason."""
    if reason := linear.supports(x, w):
        return reason
    *lead, groups, _ = x.shape
    count = math.prod(lead)
    if count > tuning.DECODE_ROWS:
        return f"{count} rows; up to {tuning.DECODE_ROWS} are supported"
    spec = spec_of(w)
    if isinstance(spec, str):
        return spec
    if spec.prepared:
        return "weights whose inputs are rotated or sorted"
    outputs = tuning.tile_for(spec, count).outputs
    if spec.rows % (groups * outputs):
        return f"{groups} groups of {spec.rows} outputs; multiples of {outputs} are supported"
    return None


def grouped(x: jax.Array, w: Any, layer: Any = None, *, interpret: bool = False) -> jax.Array:
    """See `reference.grouped`; x is bfloat16, and a row's bits depend on nothing but the row and the
    weight.

    Raises:
      ValueError: what is not supported.
    """
    if reason := supports(x, w):
        raise ValueError(f"grouped: {reason}")
    spec = spec_of(w)
    assert isinstance(spec, Spec)
    *lead, groups, k = x.shape
    tile, member = tuning.tile_for(spec, math.prod(lead)), tools.scalar(0 if layer is None else layer)
    y = linear.launch(spec, x.reshape(-1, k), planes_of(w), member, tile, interpret, groups)
    return y.reshape(*lead, groups, spec.rows // groups)
