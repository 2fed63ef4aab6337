"""Judging the formats: stored tensors against the numbers that the real libraries made of them.

A vector folder has `index.json` and safetensors files. Each case names its tensors as a checkpoint
would, the float32 `expected`, the configuration that announces it, and how equal is equal:

    exact   equal as numbers (-0 equals 0, NaN matches NaN); with subnormal_as_zero a result may be
            0 where |expected| < 2^-126
    close   |error| <= rtol |expected| + atol_scale max |expected|
    bits    the stored words come back bit for bit
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import formats
from .checkpoint import read_json
from .detect import detect
from .errors import CheckpointError
from .formats.bf16 import bf16_tensor
from .formats.exl3 import codebook_of, decode
from .formats.exlr8 import exlr8_half
from .formats.gguf import gguf_tensor
from .safetensors import SafetensorsFile

INDEX = "index.json"
MODULE = "module"
"""Where the judged tensors stand: `module.weight` and so on."""


@dataclasses.dataclass(frozen=True)
class Line:
    """One case.

    Attributes:
      name: the case's.
      rule: how it is compared.
      error: the largest |result - expected|, over entries that are numbers in both.
      ok: whether the rule holds.
      note: what went wrong, where nothing could be compared.
    """

    name: str
    rule: str
    error: float | None
    ok: bool
    note: str = ""


def judge(folder: str | Path) -> Iterator[Line]:
    """Every case of a vector folder, in the order of its index.

    Raises:
      CheckpointError: the folder cannot be read.
    """
    folder = Path(folder)
    cases = read_json(folder / INDEX).get("cases")
    if not isinstance(cases, list):
        raise CheckpointError(f"{folder / INDEX}: cases is {type(cases).__name__}; allowed: a list")
    files: dict[str, SafetensorsFile] = {}
    for case in cases:
        name = str(case.get("name"))
        rule = str((case.get("compare") or {}).get("mode"))
        try:
            if case["file"] not in files:
                files[case["file"]] = SafetensorsFile(folder / case["file"])
            tensors, expected = _tensors(files[case["file"]], case)
            yield compare(name, result(case, tensors), expected, case["compare"])
        except CheckpointError as error:
            yield Line(name, rule, None, False, str(error))
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"{folder / INDEX}: case {name!r}: {error!r}") from None


def _tensors(
    file: SafetensorsFile, case: dict[str, Any]
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    names = {role: entry["key"] for role, entry in case["tensors"].items()}
    wanted = {**names, "expected": case["expected"]["key"]}
    for key in wanted.values():
        if key not in file.tensors:
            raise CheckpointError(f"{file.path}: tensor {key!r} is missing")
    return {role: file.read(key) for role, key in names.items()}, file.read(wanted["expected"])


def result(case: dict[str, Any], tensors: dict[str, np.ndarray]) -> np.ndarray:
    """What this code makes of a case's tensors, in the case's layout.

    Raises:
      CheckpointError: the tensors are refused.
    """
    decoder, params = case.get("decoder"), case.get("params") or {}
    if decoder == "gguf":
        return _numbers(gguf_tensor(jnp.asarray(tensors["data"]), params["type"]))
    if decoder == "bf16":
        return _bits(tensors["weight"])
    if decoder == "exl3_inner":
        codebook = codebook_of(tensors.get("mcg"), tensors.get("mul1"))
        turned = jnp.asarray(tensors["trellis"].swapaxes(0, 1))
        return np.asarray(jax.jit(decode, static_argnums=1)(turned, codebook)).T
    if decoder == "exlr8":
        node = exlr8_half(
            tensors["trellis"], tensors["chan"], tensors["block"], tensors["signs"], params["part"]
        )
        return _numbers(node).T
    node = _detected(case, tensors)
    numbers = _numbers(node)
    return numbers.swapaxes(-1, -2) if str(case.get("layout")).endswith("in,out") else numbers


def _detected(case: dict[str, Any], tensors: dict[str, np.ndarray]) -> Any:
    """The node that loading would make of these tensors."""
    if set(tensors) == {"blocks", "scales"}:
        named = {f"{MODULE}_{role}": a for role, a in tensors.items()}
    else:
        named = {f"{MODULE}.{role}": a for role, a in tensors.items()}
    config = case.get("quantization_config") or {}
    if "quantization_config" not in config:
        config = {"quantization_config": config}
    found = detect({name: (a.dtype, a.shape) for name, a in named.items()}, config)
    if len(found) != 1:
        raise CheckpointError(
            f"{case['name']}: {', '.join(sorted(tensors))} are {len(found)} quantized weights"
        )
    # Vectors hold NaN scales on purpose, which loading refuses.
    return next(iter(found.values())).build(named.__getitem__, check=False)


def _numbers(node: Any) -> np.ndarray:
    return np.asarray(jax.jit(formats.dequantize)(jax.tree.map(jnp.asarray, node)))


def _bits(weight: np.ndarray) -> np.ndarray:
    flat = bf16_tensor(weight.reshape(1 if weight.ndim < 2 else -1, weight.shape[-1]), always=True)
    words = jax.jit(lambda node: node.words())(jax.tree.map(jnp.asarray, flat))
    return np.asarray(words).reshape(weight.shape).view(weight.dtype)


def compare(name: str, out: np.ndarray, expected: np.ndarray, rule: dict[str, Any]) -> Line:
    """A result against the expected numbers, by the case's rule."""
    mode = str(rule.get("mode"))
    if out.shape != expected.shape:
        note = f"the result is {list(out.shape)}, expected is {list(expected.shape)}"
        return Line(name, mode, None, False, note)
    if mode == "bits":
        size = expected.dtype.itemsize
        got, wanted = (np.ascontiguousarray(a).view(f"u{size}") for a in (out, expected))
        off = int((got != wanted).sum())
        return Line(name, mode, float(off), off == 0, "" if off == 0 else f"{off} words differ")
    with np.errstate(invalid="ignore", over="ignore"):
        a, b = out.astype(np.float64), expected.astype(np.float64)
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        error = np.where(same, 0.0, np.abs(a - b))
    if rule.get("subnormal_as_zero"):
        same |= (a == 0) & (np.abs(b) < 2.0**-126)
    if mode == "close":
        finite = np.abs(b[np.isfinite(b)])
        allowed = rule["rtol"] * np.abs(b) + rule["atol_scale"] * finite.max(initial=0)
        same |= error <= allowed
    elif mode != "exact":
        return Line(name, mode, None, False, f"compare mode {mode!r}; known: exact, close, bits")
    numbers = error[np.isfinite(error)]
    off = int((~same).sum())
    largest = float(numbers.max(initial=0))
    return Line(name, mode, largest, off == 0, "" if off == 0 else f"{off} of {a.size} are off")
