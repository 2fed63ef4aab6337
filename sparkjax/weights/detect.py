"""Which tensors of a checkpoint make up which quantized weight, and in what format.

Decided per weight from names, dtypes and shapes; the config only chooses between readings that
look alike, since configs lie (an "NVFP4" checkpoint has BF16 layers, an "fp8" one fp4 experts). A
plain BF16, F16 or F32 `.weight` is unquantized whatever the config says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .errors import CheckpointError
from .formats import exl3
from .formats.autoround import autoround_gptq
from .formats.awq import awq_tensor
from .formats.fp8 import fp8_tensor
from .formats.gptq import PLANES, gptq_tensor
from .formats.int8 import int8_tensor
from .formats.mxfp4 import GROUP as MX_GROUP
from .formats.mxfp4 import mxfp4_blocks, mxfp4_tensor
from .formats.mxfp8 import mxfp8_tensor
from .formats.nvfp4 import nvfp4_compressed, nvfp4_modelopt
from .formats.packed import packed_tensor
from .quant_config import AUTOROUND, QuantConfig

Tensors = Mapping[str, tuple[np.dtype, tuple[int, ...]]]
Arrays = dict[str, np.ndarray]

BESIDE = {
    "_scale_inv": "scale",
    "_scale": "scale",
    "_scale_2": "whole",
    "_global_scale": "divisor",
    "_shape": "shape",
    "_zero_point": "zero",
    "_g_idx": "groups",
    "_packed": "packed",
    "_blocks": "blocks",
    "_scales": "scales",
}
"""Suffixes of a weight's name (`X.weight`, or a parameter `X`) and the roles of such tensors."""
INSIDE = {
    "scale": "scale",
    "qscale_weight": "scale",
    "qweight": "qweight",
    "qzeros": "qzeros",
    "scales": "scales",
    "g_idx": "groups",
    "trellis": "trellis",
    "suh": "suh",
    "svh": "svh",
    "su": "su",
    "sv": "sv",
    "mcg": "mcg",
    "mul1": "mul1",
}
"""Names beside `weight` in a module."""
ACTIVATIONS = (
    "input_scale",
    "input_global_scale",
    "input_zero_point",
    "activation_scale",
    "output_scale",
    "qscale_act",
    "k_scale",
    "v_scale",
    "q_scale",
    "prob_scale",
)
"""Names of what belongs to quantized activations and caches; weights do not need them."""
REFUSED = {
    "pre_quant_scale": "inputs are scaled before the product (AWQ in ModelOpt), which is not supported",
    "svdquant_lora_a": "SVDQuant's low-rank part is not supported",
    "svdquant_lora_b": "SVDQuant's low-rank part is not supported",
}
PACKED_DTYPES = ("float8_e4m3fn", "float8_e5m2", "uint8", "int8", "int16", "int32")
SCALES = ("scale", "whole", "divisor", "scales", "suh", "svh")
"""Roles whose numbers must be finite."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """A quantized weight as it lies in the files.

    Attributes:
      name: of the weight itself, as if it were not quantized.
      format: what it is called in messages.
      roles: the files' tensors by what they are for.
      unread: tensors that belong to it and are not needed.
      make: from arrays by role to a node.
      problem: why it cannot be read.
    """

    name: str
    format: str
    roles: dict[str, str]
    unread: tuple[str, ...] = ()
    make: Callable[[Arrays], Any] | None = None
    problem: str | None = None
    dtypes: str = ""

    @property
    def tensors(self) -> tuple[str, ...]:
        """Every tensor of the files that belongs to it."""
        return (*self.roles.values(), *self.unread)

    def build(self, read: Callable[[str], np.ndarray], *, check: bool = True) -> Any:
        """The node over the files' arrays.

        Args:
          read: a tensor of the files by name.
          check: refuse scales that are not numbers.

        Raises:
          CheckpointError: an unknown format, shapes that do not fit, or such scales.
        """
        if self.problem is not None or self.make is None:
            raise CheckpointError(f"tensor {self.name!r} ({self.dtypes}): {self.problem}")
        arrays = {role: read(name) for role, name in self.roles.items()}
        if check:
            for role in SCALES:
                if role in arrays:
                    _finite(self.roles[role], arrays[role], role)
        try:
            return self.make(arrays)
        except (CheckpointError, ValueError, IndexError, TypeError, ZeroDivisionError) as error:
            # Whatever a format trips over was in the file: axes that it did not expect, mostly.
            known = isinstance(error, CheckpointError)
            reason = error if known else "these shapes do not go together"
            raise CheckpointError(
                f"tensor {self.name!r} ({self.format}; {self.dtypes}): {reason}"
            ) from (None if known else error)


def _finite(name: str, scale: np.ndarray, role: str) -> None:
    if scale.dtype in (np.uint8, np.dtype("float8_e8m0fnu")):
        bad = scale.view(np.uint8) == 0xFF
    else:
        bad = ~np.isfinite(scale.astype(np.float32))
    if bad.any():
        at = [int(i) for i in np.argwhere(bad)[0]]
        raise CheckpointError(f"tensor {name!r} ({scale.dtype}): the scale at {at} is not a number")
    if role == "divisor" and not scale.all():
        raise CheckpointError(f"tensor {name!r}: a scale that divides is zero")


def detect(tensors: Tensors, config: Mapping[str, Any] | None = None) -> dict[str, Stored]:
    """The quantized weights of a checkpoint, by the name that the plain weight would have.

    What cannot be read has a `problem`, and raises only when it is built: a checkpoint may hold
    parts that nobody asks for.

    Args:
      tensors: dtype and shape of every tensor.
      config: the keys of config.json.
    """
    hints = QuantConfig(config or {})
    found = {}
    for name in tensors:
        logical = _logical(name, tensors)
        if logical is not None and logical not in found:
            found[logical] = _stored(logical, tensors, hints)
    return found


def activation_tensors(tensors: Tensors) -> set[str]:
    """Tensors that belong to quantized activations or caches."""
    return {name for name in tensors if name.rpartition(".")[2] in ACTIVATIONS}


def _logical(name: str, tensors: Tensors) -> str | None:
    """The weight that a tensor is the main part of, if it is the main part of a quantized one."""
    module, _, last = name.rpartition(".")
    if last in ("qweight", "trellis"):
        return f"{module}.weight"
    if name.endswith("_packed"):
        return name.removesuffix("_packed")
    if name.endswith("_blocks") and name.removesuffix("_blocks") + "_scales" in tensors:
        return name.removesuffix("_blocks")
    dtype, shape = tensors[name]
    if dtype.name not in PACKED_DTYPES or len(shape) < 2:
        return None
    beside = any(f"{name}{suffix}" in tensors for suffix in ("_scale_inv", "_scale"))
    return name if beside or last == "weight" else None


def _stored(name: str, tensors: Tensors, hints: QuantConfig) -> Stored:
    module = name.removesuffix(".weight")
    roles: dict[str, str] = {}
    problem = None

    def add(role: str, tensor: str) -> None:
        nonlocal problem
        if tensor in tensors:
            if role in roles:
                problem = f"{roles[role]!r} and {tensor!r} have the same meaning; allowed: one"
            roles[role] = tensor

    add("weight", name)
    for suffix, role in BESIDE.items():
        add(role, f"{name}{suffix}")
    unread = [f"{name}_{last}" for last in ACTIVATIONS if f"{name}_{last}" in tensors]
    if module != name:
        for last, role in INSIDE.items():
            add(role, f"{module}.{last}")
        unread += [f"{module}.{last}" for last in ACTIVATIONS if f"{module}.{last}" in tensors]
        for last, reason in REFUSED.items():
            if f"{module}.{last}" in tensors:
                problem = f"{last}: {reason}"
    facts = {role: tensors[tensor] for role, tensor in roles.items()}
    dtypes = ", ".join(
        f"{roles[role].removeprefix(module).lstrip('._')} {dtype.name} {list(shape)}"
        for role, (dtype, shape) in facts.items()
    )
    kind, make = None, None
    if problem is None:
        kind, make, problem = _choose(module, facts, hints)
    return Stored(name, kind or "unknown", roles, tuple(unread), make, problem, dtypes)


Choice = tuple[str | None, Callable[[Arrays], Any] | None, str | None]


def _unknown(reason: str = "no known weight format has these tensors") -> Choice:
    return None, None, reason


def _choose(
    module: str, facts: dict[str, tuple[np.dtype, tuple[int, ...]]], hints: QuantConfig
) -> Choice:
    roles = set(facts)
    if "trellis" in roles:
        return _trellis(facts)
    if "qweight" in roles:
        return _qweight(module, facts, hints)
    if {"blocks", "scales"} <= roles:
        if facts["blocks"][0] != np.uint8 or facts["scales"][0] != np.uint8:
            return _unknown()
        return "MXFP4", lambda a: mxfp4_blocks(a["blocks"], a["scales"]), None
    refusal = hints.refusal("other")
    if refusal is not None:
        return _unknown(refusal)
    main = "packed" if "packed" in roles else "weight"
    if main not in roles or "scale" not in roles:
        return _unknown("a packed dtype without scales beside it")
    return _scaled(module, main, facts, hints)


def _scaled(
    module: str, main: str, facts: dict[str, tuple[np.dtype, tuple[int, ...]]], hints: QuantConfig
) -> Choice:
    """Formats of a packed tensor and `scale`."""
    (dtype, shape), (scale, grid) = facts[main], facts["scale"]
    powers = scale.name in ("uint8", "float8_e8m0fnu")
    block = next(iter(hints.blocks()), None)
    if dtype.name == "float8_e4m3fn" and main == "weight":
        if "whole" in facts or "divisor" in facts:
            return _unknown()
        per_group = grid == (*shape[:-1], -(-shape[-1] // MX_GROUP))
        if powers and per_group:
            return "MXFP8", lambda a: mxfp8_tensor(a["weight"], a["scale"]), None
        shards = hints.shards(module)
        return "FP8", lambda a: fp8_tensor(a["weight"], _e8m0(a["scale"]), block, shards), None
    if dtype.name == "int32" and main == "packed" and not powers:
        return "pack-quantized", lambda a: _packed(module, a, hints), None
    if dtype.name == "int8" and main == "weight" and not powers:
        group = hints.groups(module)
        return (
            "int8",
            lambda a: int8_tensor(a["weight"], a["scale"], a.get("zero"), next(iter(group), None)),
            None,
        )
    if dtype.name not in ("uint8", "int8"):
        return _unknown()
    if powers:
        if dtype.name == "int8" and main == "packed":
            return _unknown()
        if not grid or 2 * shape[-1] != MX_GROUP * grid[-1]:
            return _unknown("an E8M0 scale that is not one for every 32 codes of 4 bits")
        return "MXFP4", lambda a: mxfp4_tensor(a[main], a["scale"]), None
    if scale.name == "float8_e4m3fn" and dtype.name == "uint8":
        if main == "packed" and "divisor" in facts and "whole" not in facts:
            make = lambda a: nvfp4_compressed(a["packed"], a["scale"], a["divisor"])  # noqa: E731
            return "NVFP4", make, None
        if main == "weight" and "whole" in facts and "divisor" not in facts:
            make = lambda a: nvfp4_modelopt(a["weight"], a["scale"], a["whole"])  # noqa: E731
            return "NVFP4", make, None
        return _unknown("NVFP4 without exactly one of weight_global_scale and weight_scale_2")
    return _unknown()


def _e8m0(scale: np.ndarray) -> np.ndarray:
    """Bytes beside FP8 weights are powers of two, whatever dtype the file gives them."""
    return scale.view(np.uint8) if scale.dtype.name == "float8_e8m0fnu" else scale


def _packed(module: str, a: Arrays, hints: QuantConfig) -> Any:
    if "shape" not in a:
        raise CheckpointError("weight_shape is missing; it says how many inputs there are")
    rows, cols = (int(n) for n in a["shape"].reshape(-1, 2)[0])
    if a["packed"].shape[-2] != rows:
        raise CheckpointError(f"weight_shape is [{rows}, {cols}]")
    groups = hints.groups(module)
    fitting = [g for g in groups if -(-cols // g) == a["scale"].shape[-1]]
    return packed_tensor(
        a["packed"],
        a["scale"],
        cols,
        a.get("zero"),
        a.get("groups"),
        next(iter(fitting or groups), None),
        hints.widths(module),
    )


def _qweight(
    module: str, facts: dict[str, tuple[np.dtype, tuple[int, ...]]], hints: QuantConfig
) -> Choice:
    """GPTQ packs along the inputs and keeps N columns, AWQ packs along the outputs."""
    if not {"qzeros", "scales"} <= set(facts):
        return _unknown("qweight without qzeros and scales beside it")
    if any(facts[role][0] != np.int32 for role in ("qweight", "qzeros")):
        return _unknown()
    (_, shape), (_, scales) = facts["qweight"], facts["scales"]
    if len(shape) < 2 or len(scales) != len(shape):
        return _unknown()
    gptq = shape[-1] == scales[-1]
    refusal = hints.refusal("gptq" if gptq else "awq")
    if refusal is not None:
        return _unknown(refusal)
    group = next(iter(hints.groups(module)), None)
    if not gptq:
        return "AWQ", lambda a: awq_tensor(a["qweight"], a["qzeros"], a["scales"], group), None
    width = next(iter(hints.widths(module)), None)
    if hints.method in AUTOROUND:
        return (
            "AutoRound",
            lambda a: autoround_gptq(
                a["qweight"], a["qzeros"], a["scales"], hints.values, group, width
            ),
            None,
        )

    def make(a: Arrays) -> Any:
        # 5, 6 and 7 bits are planar in GPTQ files, whatever the label says.
        bits = 32 * a["qzeros"].shape[-1] // a["scales"].shape[-1]
        planar = bits in PLANES and (hints.layout == "gptq_p" or bits > 4)
        return gptq_tensor(
            a["qweight"],
            a["qzeros"],
            a["scales"],
            a.get("groups"),
            group,
            minus_one=hints.layout == "gptq" and not planar,
            planar=planar,
            width=width,
        )

    return "GPTQ", make, None


def _trellis(facts: dict[str, tuple[np.dtype, tuple[int, ...]]]) -> Choice:
    if len(facts["trellis"][1]) != 3:
        return _unknown("a trellis that is not 3-D (an embedding table) is not supported")
    if not ({"suh", "su"} & set(facts) and {"svh", "sv"} & set(facts)):
        return _unknown("a trellis without suh and svh (or su and sv) beside it")

    def make(a: Arrays) -> Any:
        inner = a["suh"] if "suh" in a else exl3.unpack_signs(a["su"])
        outer = a["svh"] if "svh" in a else exl3.unpack_signs(a["sv"])
        codebook = exl3.codebook_of(a.get("mcg"), a.get("mul1"))
        return exl3.exl3_tensor(a["trellis"], inner, outer, codebook)

    return "EXL3", make, None
