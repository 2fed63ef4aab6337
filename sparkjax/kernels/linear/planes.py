"""What the GPU kernels see of a weight: 32-bit words, scales, and how they become numbers.

Every packed format here has its codes in rows along the inputs, so its bytes are read as
little-endian words in place (a bitcast, no copy). Leading axes (layers, experts) become one, the
members.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ...weights.formats.base import QuantizedTensor
from ...weights.formats.fp4 import Fp4Tensor
from ...weights.formats.gptq import GptqTensor
from ...weights.formats.packed import PackedTensor
from ...weights.formats.scaled import ScaledTensor
from .decode import FIELDS


@dataclasses.dataclass(frozen=True)
class Spec:
    """How words become weights; static.

    Attributes:
      code: "bf16", or a key of `decode.FIELDS`.
      rows, cols: N and K.
      offset: int8 only: codes are stored plus 128.
      group: words under one byte of `group_scale`; 0 where there is none.
      group_kind: "e4m3" or "e8m0".
      block: rows and inputs under one number of `block_scale`, 0 for all of them; None where
        there is none. It multiplies sums in float32.
      zero: whether there are zero points, GPTQ's: packed along the outputs, one word for eight.
      minus_one: whether those are stored minus one.
      whole: "", "times" or "over": what a scale of the whole tensor does.
    """

    code: str
    rows: int
    cols: int
    offset: bool = False
    group: int = 0
    group_kind: str = ""
    block: tuple[int, int] | None = None
    zero: bool = False
    minus_one: bool = False
    whole: str = ""

    @property
    def fields(self) -> int:
        """Codes in an element of `Planes.words`."""
        return FIELDS.get(self.code, 1)

    @property
    def words(self) -> int:
        """Elements in a row of `Planes.words`."""
        return self.cols // self.fields

    @property
    def lifted(self) -> bool:
        """Whether group scales carry a power of two, see `decode.e2m1`."""
        return self.code == "e2m1" and self.group_kind == "e4m3"

    @property
    def step(self) -> int:
        """The most words that may be summed before a block scale is due."""
        inputs = self.block[1] if self.block and self.block[1] else self.cols
        return inputs // self.fields


@dataclasses.dataclass(frozen=True)
class Planes:
    """Arrays of a weight; M is the product of the leading axes.

    Attributes:
      words: uint32 (bfloat16 where the code is "bf16") [M, N, words].
      group_scale: uint32 [M, N, words of a row's bytes] or None.
      block_scale: [M, blocks of rows, blocks of inputs], a float dtype or uint8 (E8M0), or None.
      zero: int32 [M, words of N, blocks of inputs] or None.
      whole: float32 [M] or None.
    """

    words: jax.Array
    group_scale: jax.Array | None = None
    block_scale: jax.Array | None = None
    zero: jax.Array | None = None
    whole: jax.Array | None = None

    def arrays(self) -> list[jax.Array]:
        """Those that there are, in the order of `names`."""
        return [getattr(self, name) for name in self.names()]

    def names(self) -> tuple[str, ...]:
        """Names of the planes that there are."""
        fields = (f.name for f in dataclasses.fields(self))
        return tuple(name for name in fields if getattr(self, name) is not None)


def spec_of(w: Any) -> Spec | str:
    """The Spec of a weight, or why the kernels cannot take it."""
    if not isinstance(w, QuantizedTensor):
        return _dense(w)
    if not isinstance(w, (Fp4Tensor, ScaledTensor, PackedTensor, GptqTensor)):
        return f"no kernel for {type(w).__name__}"
    if w.shares != (1, 1):
        return "a weight of several ranks' shares"
    if w.cols % 16:
        return f"{w.cols} inputs; allowed: a multiple of 16"
    if isinstance(w, Fp4Tensor):
        return _fp4(w)
    if isinstance(w, ScaledTensor):
        return _scaled(w)
    if isinstance(w, PackedTensor):
        if w.zero is not None or w.groups is not None:
            return "packed integers with zero points or an order of groups"
        return _integers(w, w.width)
    if w.planar or w.groups is not None or w.width != 4 or w.rows % 8:
        return "GPTQ in planes, with an order of groups, or of other than 4 bits"
    found = _integers(w, w.width)
    if isinstance(found, str):
        return found
    return dataclasses.replace(found, zero=True, minus_one=w.minus_one)


def _dense(w: Any) -> Spec | str:
    if w.dtype != jnp.bfloat16:
        return f"a weight of {w.dtype}; bfloat16 is supported"
    n, k = w.shape[-2:]
    if k % 16:
        return f"{k} inputs; allowed: a multiple of 16"
    return Spec("bf16", n, k)


def _fp4(w: Fp4Tensor) -> Spec | str:
    if w.group not in (16, 32):
        return f"FP4 in groups of {w.group}; allowed: 16, 32"
    if w.cols % (w.group * 4):
        return f"{w.cols} inputs; allowed: a multiple of {w.group * 4}, four groups"
    kind = "e8m0" if w.scale.dtype == jnp.uint8 else "e4m3"
    whole = "" if w.whole is None else "over" if w.divide else "times"
    return Spec("e2m1", w.rows, w.cols, group=w.group // 8, group_kind=kind, whole=whole)


def _scaled(w: ScaledTensor) -> Spec | str:
    code = {"float8_e4m3fn": "e4m3", "int8": "int8"}.get(str(w.weight.dtype))
    if code is None or w.zero is not None:
        return f"weights of {w.weight.dtype}, or with zero points"
    bn, bk = w.block
    if code == "e4m3" and w.scale.dtype == jnp.uint8 and (bn, bk) == (1, 32):
        if w.cols % 128:
            return f"{w.cols} inputs; allowed: a multiple of 128, four groups"
        return Spec(code, w.rows, w.cols, group=8, group_kind="e8m0")
    return _blocked(Spec(code, w.rows, w.cols, block=(bn, 0 if bk >= w.cols else bk)))


def _integers(w: Any, width: int) -> Spec | str:
    if width not in (4, 8):
        return f"integers of {width} bits; allowed: 4, 8"
    code = f"int{width}"
    block = (1, 0 if w.group >= w.cols else w.group)
    return _blocked(Spec(code, w.rows, w.cols, offset=width == 8, block=block))


def _blocked(spec: Spec) -> Spec | str:
    assert spec.block is not None
    bk = spec.block[1]
    if bk and (bk % (16 * spec.fields) or bk & (bk - 1)):
        return f"scales for {bk} inputs; allowed: a power of two from {16 * spec.fields}"
    return spec


def planes_of(w: Any) -> Planes:
    """The Planes of a weight that has a Spec."""
    if not isinstance(w, QuantizedTensor):
        return Planes(_members(w))
    if isinstance(w, Fp4Tensor):
        whole = None if w.whole is None else w.whole.reshape(-1)
        return Planes(_words(w.packed), _words(w.scale), whole=whole)
    if isinstance(w, ScaledTensor):
        if spec_of(w).group:  # type: ignore[union-attr]
            return Planes(_words(w.weight), _words(w.scale))
        return Planes(_words(w.weight), block_scale=_members(w.scale))
    if isinstance(w, GptqTensor):
        return Planes(_words(w.packed), block_scale=_members(w.scale), zero=_members(w.zero))
    assert isinstance(w, PackedTensor)
    return Planes(_words(w.packed), block_scale=_members(w.scale))


def _members(plane: jax.Array) -> jax.Array:
    """[M, N, K]."""
    return plane.reshape(math.prod(plane.shape[:-2]), *plane.shape[-2:])


def _words(plane: jax.Array) -> jax.Array:
    """[M, N, words]: rows of bytes or of int32 as uint32."""
    plane = _members(plane)
    size = plane.dtype.itemsize
    if size < 4:
        plane = plane.reshape(*plane.shape[:-1], plane.shape[-1] * size // 4, 4 // size)
    return lax.bitcast_convert_type(plane, jnp.uint32)
