"""What the GPU kernels see of a weight: 32-bit words, scales, and how they become numbers.

Packed bytes are read as little-endian words in place (a bitcast, no copy). Most formats have their
codes in rows along the inputs, AWQ along the outputs. Leading axes (layers, experts) become one,
the members.

The kernels go through a weight in elements: tiles of uint32 [rows, columns], each with `fields`
codes of neighbouring inputs of one output, or with `across` codes of neighbouring outputs at one
input. Where such a group of codes fills a word the elements are the words of the plane, else they
are cut out of its bit stream.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax

from ...weights.formats.awq import AwqTensor
from ...weights.formats.base import QuantizedTensor
from ...weights.formats.bf16 import Bf16Tensor
from ...weights.formats.exl3 import Exl3Tensor
from ...weights.formats.fp4 import Fp4Tensor
from ...weights.formats.gguf import GGUFTensor
from ...weights.formats.gptq import PLANES, GptqTensor
from ...weights.formats.ordered import Ordered
from ...weights.formats.packed import PackedTensor
from ...weights.formats.scaled import ScaledTensor
from . import blocks, trellis
from .decode import FIELDS


@dataclasses.dataclass(frozen=True)
class Spec:
    """How words become weights; static.

    Attributes:
      code: "bf16", "trellis" (see trellis.py), "gguf" (blocks.py), "bf12" (see `formats.bf16`), "bits" (unsigned integers; "int4" where they are eight in a word along the
        inputs), or another key of `decode.FIELDS`.
      rows, cols: N and K.
      width: bits of an integer code.
      per: codes along the inputs in an element; 0 is as many as `decode.FIELDS` says.
      across: codes along the outputs in an element; where it is more than one, `per` is one.
      planar: codes are cut into planes, see `formats.gptq`.
      offset: int8 only: codes are stored plus 128.
      group: words under one byte of `group_scale`; 0 where there is none.
      group_rows: outputs under one byte of it.
      group_kind: "e4m3" or "e8m0".
      block: rows and inputs under one number of `block_scale`, 0 for all of them; None where
        there is none. It multiplies sums in float32.
      zero: what zero points there are: "" none, "stream" packed along the outputs as a bit stream,
        "slots" as AWQ's weights are, "bytes" int8 without the codes' offset.
      minus_one: whether those of a stream are stored minus one.
      whole: "", "times" or "over": what a scale of the whole tensor does.
      ordered: whether inputs are to be taken in another order first.
      kind: GGUF's name of the type.
      rate, codebook, as_e4m3: of a trellis: 8 times its bits a weight, and see `formats.exl3`.
      escapes: a power of two from 16 that no row of 12-bit weights has more escapes than.
    """

    code: str
    rows: int
    cols: int
    width: int = 0
    per: int = 0
    across: int = 1
    planar: bool = False
    offset: bool = False
    group: int = 0
    group_rows: int = 1
    group_kind: str = ""
    block: tuple[int, int] | None = None
    zero: str = ""
    minus_one: bool = False
    whole: str = ""
    escapes: int = 0
    ordered: bool = False
    kind: str = ""
    rate: int = 0
    codebook: str = ""
    as_e4m3: bool = False

    @property
    def prepared(self) -> bool:
        """Whether a row of x must be made ready for this one weight."""
        return self.ordered or self.code == "trellis"

    @property
    def fields(self) -> int:
        """Codes along the inputs in an element."""
        return self.per or FIELDS.get(self.code, 1)

    @property
    def words(self) -> int:
        """Elements in a row."""
        return self.cols // self.fields

    @property
    def run(self) -> int:
        """Inputs from one field of an element to the next, and elements that lie in between."""
        return blocks.WIDTH if self.code == "gguf" else 1

    @property
    def stride(self) -> int:
        """Bits from one code of an element to the next."""
        return 8 if self.planar else self.width

    @property
    def size(self) -> int:
        """Bits of the plane under one element; 32 where elements are the plane's words."""
        return self.width * self.fields * self.across or 32

    @property
    def ahead(self) -> bool:
        """Whether words are gathered, so that they are loaded into registers a step ahead; others go
        through shared memory, as they lie."""
        return self.code in ("trellis", "gguf") or self.planar or 32 % self.size != 0

    @property
    def loads(self) -> int:
        """Words that are loaded for an element."""
        if self.code == "bf12":
            return 2
        if self.code == "trellis":
            return trellis.words_of(self.rate)
        return len(PLANES[self.width]) if self.planar else 2 if 32 % self.size else 1

    @property
    def lifted(self) -> bool:
        """Whether group scales carry a power of two, see `decode.e2m1`."""
        return self.code == "e2m1" and self.group_kind == "e4m3"

    @property
    def step(self) -> int:
        """The most elements that may be summed before a block scale is due."""
        inputs = self.block[1] if self.block and self.block[1] else self.cols
        return inputs // self.fields


@dataclasses.dataclass(frozen=True)
class Planes:
    """Arrays of a weight; M is the product of the leading axes.

    Attributes:
      words: uint32 (bfloat16 where the code is "bf16") [M, N, words of a row], or with codes along
        the outputs [M, words of N, K], or a trellis's tiles [M, N / 16, K / 16 * words], or GGUF's
        uint8 [M, N, bytes of a row].
      group_scale: uint32 [M, N (or blocks of outputs), words of a row's bytes] or None.
      block_scale: [M, blocks of rows, blocks of inputs], a float dtype or uint8 (E8M0), or None.
      zero: int32 [M, words of N, blocks of inputs], int8 shaped as `block_scale`, or None.
      whole: float32 [M] or None.
      order: int32 [M, K], the input that each column stands for, or None.
      in_scale, out_scale: float16 [M, K] and [M, N], padded as the trellis is, or None.
      codes: 12 bits only: uint16 [M, N, K / 4], the exponents' codes; `words` has the rest.
      base: int32 [M]; places: int32 [M, escapes]; exponents: uint8 [M, escapes]; starts: int32 [M,
        N]: see `formats.bf16`, where the last is `first`.
    """

    words: jax.Array
    group_scale: jax.Array | None = None
    block_scale: jax.Array | None = None
    zero: jax.Array | None = None
    whole: jax.Array | None = None
    order: jax.Array | None = None
    in_scale: jax.Array | None = None
    out_scale: jax.Array | None = None
    codes: jax.Array | None = None
    base: jax.Array | None = None
    places: jax.Array | None = None
    exponents: jax.Array | None = None
    starts: jax.Array | None = None

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
    if type(w) not in _SPECS:
        return f"no kernel for {type(w).__name__}"
    if w.shares != (1, 1):
        return "a weight of several ranks' shares"
    if w.shape[-1] % 16:
        return f"{w.shape[-1]} inputs; allowed: a multiple of 16"
    return _SPECS[type(w)](w)


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
    zero = "" if w.zero is None else str(w.zero.dtype)
    if code is None or zero not in (("", "int8") if code == "int8" else ("",)):
        return f"weights of {w.weight.dtype} with zero points of {zero or 'no'} dtype"
    bn, bk = w.block
    if code == "e4m3" and w.scale.dtype == jnp.uint8 and bn and bk == 32:
        if w.cols % 128:
            return f"{w.cols} inputs; allowed: a multiple of 128, four groups"
        return Spec(code, w.rows, w.cols, group=8, group_rows=bn, group_kind="e8m0")
    block = (bn, 0 if bk >= w.cols else bk)
    width = 8 if code == "int8" else 0
    return _blocked(Spec(code, w.rows, w.cols, width, block=block, zero=zero and "bytes"))


def _packed(w: PackedTensor) -> Spec | str:
    if w.groups is not None:
        return "packed integers with an order of groups"
    zero = "" if w.zero is None else "bytes" if w.zero.dtype == jnp.int8 else "stream"
    return _integers(w, zero=zero)


def _gptq(w: GptqTensor) -> Spec | str:
    if w.groups is not None:
        return "GPTQ with an order of groups, which was not sorted at load"
    if w.planar and w.rows % 32:
        return f"GPTQ in planes with {w.rows} outputs; allowed: a multiple of 32"
    return _integers(w, zero="stream", minus_one=w.minus_one, planar=w.planar)


def _integers(w: Any, **more: Any) -> Spec | str:
    if not 2 <= w.width <= 8:
        return f"integers of {w.width} bits; allowed: 2 to 8"
    code = {4: "int4", 8: "int8"}.get(w.width, "bits")
    # As many as fit into a word.
    per = 4 if w.width > 4 or more.get("planar") else 8
    return _blocked(
        Spec(code, w.rows, w.cols, w.width, per, offset=w.width == 8, block=_group(w), **more)
    )


def _awq(w: AwqTensor) -> Spec | str:
    if w.width != 4 or w.rows % 8:
        return f"AWQ of {w.width} bits and {w.rows} outputs; allowed: 4 bits, a multiple of 8"
    return _blocked(Spec("bits", w.rows, w.cols, 4, 1, across=8, block=_group(w), zero="slots"))


def _gguf(w: GGUFTensor) -> Spec | str:
    layout = blocks.LAYOUTS.get(w.kind)
    if layout is None:
        return f"GGUF {w.kind}; allowed: {', '.join(blocks.LAYOUTS)}"
    n, k = w.shape[-2:]
    per = layout.inputs // blocks.WIDTH
    return Spec("gguf", n, k, layout.bits, per, block=(1, layout.inputs), kind=w.kind)


def _twelve(w: Bf16Tensor) -> Spec:
    return Spec("bf12", w.rows, w.cols, escapes=max(16, 1 << max(w.widest - 1, 0).bit_length()))


def _ordered(w: Ordered) -> Spec | str:
    found = spec_of(w.inner)
    return found if isinstance(found, str) else dataclasses.replace(found, ordered=True)


def _trellis(w: Exl3Tensor) -> Spec:
    rate = w.trellis.shape[-1] // 2
    return Spec("trellis", w.rows, w.cols, rate=rate, codebook=w.codebook, as_e4m3=w.as_e4m3)


def _group(w: Any) -> tuple[int, int]:
    return (1, 0 if w.group >= w.cols else w.group)


def _blocked(spec: Spec) -> Spec | str:
    """The spec with elements of so few codes that sixteen lie under one scale."""
    assert spec.block is not None
    bk = spec.block[1]
    per = min(spec.fields, bk // 16) if bk else spec.fields
    if bk & (bk - 1) or not per or (spec.width == 0 and per < spec.fields):
        least = 16 if spec.width else 16 * spec.fields
        return f"scales for {bk} inputs; allowed: a power of two from {least}"
    return dataclasses.replace(spec, per=0 if per == FIELDS.get(spec.code, 1) else per)


_SPECS: dict[type, Callable[[Any], Spec | str]] = {
    Fp4Tensor: _fp4,
    ScaledTensor: _scaled,
    PackedTensor: _packed,
    GptqTensor: _gptq,
    AwqTensor: _awq,
    Bf16Tensor: _twelve,
    Exl3Tensor: _trellis,
    Ordered: _ordered,
    GGUFTensor: _gguf,
}


def planes_of(w: Any) -> Planes:
    """The Planes of a weight that has a Spec."""
    if not isinstance(w, QuantizedTensor):
        return Planes(_members(w))
    w = cast(Any, w)
    if isinstance(w, Fp4Tensor):
        whole = None if w.whole is None else w.whole.reshape(-1)
        return Planes(_words(w.packed), _words(w.scale), whole=whole)
    if isinstance(w, ScaledTensor) and spec_of(w).group:  # type: ignore[union-attr]
        return Planes(_words(w.weight), _words(w.scale))
    if isinstance(w, Bf16Tensor):
        codes = _members(w.codes).reshape(-1, w.rows, w.cols // 4, 2)
        return Planes(
            _words(w.low),
            codes=lax.bitcast_convert_type(codes, jnp.uint16),
            base=w.base.reshape(-1),
            places=_members(w.places)[:, 0],
            exponents=_members(w.exponents)[:, 0],
            starts=_members(w.first)[:, :, 0],
        )
    if isinstance(w, Ordered):
        return dataclasses.replace(planes_of(w.inner), order=_members(w.order)[:, 0])
    if isinstance(w, GGUFTensor):
        return Planes(_members(w.blocks))
    if isinstance(w, Exl3Tensor):
        return Planes(
            _words(w.trellis.reshape(*w.trellis.shape[:-2], -1)),
            in_scale=_members(w.in_scale)[:, 0],
            out_scale=_members(w.out_scale)[:, :, 0],
        )
    zero = None if w.zero is None else _members(w.zero)
    words = w.weight if isinstance(w, ScaledTensor) else w.packed
    return Planes(_words(words), block_scale=_members(w.scale), zero=zero)


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
