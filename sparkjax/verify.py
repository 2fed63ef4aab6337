"""The one door through which every family is judged: a checkpoint against its golden outputs.

A golden directory is a checkpoint plus `golden.safetensors` and `golden.json`: prompts, logits,
per-layer activations and greedy continuations of the reference implementation.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from .mesh.context import Context
from .model import Model
from .prediction import Predictor
from .weights.checkpoint import read_json
from .weights.safetensors import SafetensorsFile

RELATIVE, ABSOLUTE = 1e-4, 1e-3
"""What float32 may be off by: ||out - ref|| / ||ref||, and any single entry."""
BFLOAT16_FACTOR = 1.5
"""Bfloat16 logits may be off by this many times the reference's own bfloat16 run, on average."""
LAYERWISE = {"layer": "residual", "mixer_out": "mixer_out", "mlp_out": "mlp_out"}
"""Prefix of a golden's per-layer tensors -> captured activation."""


@dataclasses.dataclass(frozen=True)
class Line:
    """One comparison.

    Attributes:
      what: which output.
      relative, absolute: ||out - ref|| / ||ref|| and the largest entry of |out - ref|.
      ok: None where the line only informs.
      note: what else there is to say.
    """

    what: str
    relative: float | None
    absolute: float | None
    ok: bool | None
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Report:
    """All comparisons of one golden directory."""

    path: str
    family: str
    dtype: str
    lines: tuple[Line, ...]

    @property
    def ok(self) -> bool:
        return all(line.ok is not False for line in self.lines)

    def json(self) -> str:
        return json.dumps({**dataclasses.asdict(self), "ok": self.ok})


def verify(
    path: str | Path,
    dtype: str = "float32",
    tiles: int | None = None,
    context: Context | None = None,
) -> Report:
    """Compares a golden directory with what this code computes.

    Args:
      dtype: "float32", or "bfloat16" with its own, wider rule.
      tiles: feed the prompts in tiles of this many tokens (default: each in one call, shorter ones
        padded to the longest, so that they share their programs).
      context: how to run (default: fastest kernels on this machine, one rank).

    Raises:
      CheckpointError, UnsupportedConfig: the directory cannot be loaded.
    """
    path = Path(path)
    golden = SafetensorsFile(path / "golden.safetensors")
    facts = read_json(path / "golden.json")
    model = Model.load(path, dtype=dtype, context=context)
    lines: list[Line] = []
    lengths = [
        (golden.read(f"prompt_{i}.input_ids").size, golden.read(f"prompt_{i}.greedy").size)
        for i in range(len(facts["prompts"]))
    ]
    shape = {
        "tile": tiles or max(prompt for prompt, _ in lengths),
        "room": max(prompt + greedy for prompt, greedy in lengths),
    }
    for prompt in range(len(facts["prompts"])):
        lines += _prompt(model, golden, facts, prompt, dtype, shape)
    if "mtp.rows" in golden.tensors:
        lines += _drafts(model, golden, dtype == "float32", shape)
    return Report(str(path), facts["family"], dtype, tuple(lines))


def errors(out: np.ndarray, ref: np.ndarray) -> tuple[float, float]:
    """(||out - ref|| / ||ref||, max |out - ref|), in float64."""
    out, ref = np.asarray(out, np.float64), np.asarray(ref, np.float64)
    difference = out - ref
    norm = np.linalg.norm(ref)
    return float(np.linalg.norm(difference) / (norm or 1.0)), float(np.abs(difference).max())


def _compare(what: str, out: Any, ref: Any, judged: bool) -> Line:
    relative, absolute = errors(np.asarray(out, np.float32).reshape(ref.shape), ref)
    ok = relative <= RELATIVE and absolute <= ABSOLUTE
    return Line(what, relative, absolute, ok if judged else None)


def _prompt(
    model: Model, golden: SafetensorsFile, facts: dict, prompt: int, dtype: str, shape: dict
) -> Iterator[Line]:
    prefix = f"prompt_{prompt}."
    exact = dtype == "float32"
    tokens = golden.read(f"{prefix}input_ids")
    layered = f"{prefix}hidden.final" in golden.tensors
    capture = ("embed", "residual", "mixer_out", "mlp_out") if layered else ()
    found = model.forward(tokens, capture=capture, **shape)
    reference = golden.read(f"{prefix}logits")
    logits = np.asarray(found.logits)
    if exact:
        yield _compare(f"{prefix}logits", logits, reference, True)
    else:
        yield _bfloat16(f"{prefix}logits", logits, reference, facts)
    if layered:
        yield from _layers(model, golden, found, prefix, exact)
    yield _greedy(model, golden, prefix, tokens, exact, shape)


def _bfloat16(what: str, out: np.ndarray, ref: np.ndarray, facts: dict) -> Line:
    relative, absolute = errors(out, ref)
    mean = float(np.abs(np.asarray(out, np.float64) - ref).mean())
    agreement = float((out.argmax(-1) == ref.argmax(-1)).mean())
    own = (facts.get("bfloat16_run") or {}).get("mean_abs") or 0.0
    note = f"mean abs {mean:.4f}, argmax agreement {agreement:.4f}"
    if own <= 0:
        return Line(what, relative, absolute, None, f"{note}; the golden has no bfloat16 run")
    return Line(what, relative, absolute, mean <= BFLOAT16_FACTOR * own, f"{note}, allowed {BFLOAT16_FACTOR * own:.4f}")


def _layers(
    model: Model, golden: SafetensorsFile, found: Any, prefix: str, exact: bool
) -> Iterator[Line]:
    positions = golden.read("positions")
    yield _compare(f"{prefix}embed", found.captured["embed"], golden.read(f"{prefix}hidden.embed"), exact)
    for layer in range(model.config.layers):
        for kind, capture in LAYERWISE.items():
            name = f"{prefix}hidden.layer_{layer:02d}" if kind == "layer" else f"{prefix}{kind}.layer_{layer:02d}"
            if name in golden.tensors:
                out = np.asarray(found.captured[capture][layer])[positions]
                yield _compare(name, out, golden.read(name), exact)
    yield _compare(f"{prefix}final", found.final, golden.read(f"{prefix}hidden.final"), exact)


def _greedy(
    model: Model, golden: SafetensorsFile, prefix: str, tokens: np.ndarray, exact: bool, shape: dict
) -> Line:
    reference = golden.read(f"{prefix}greedy")
    out = model.greedy(tokens, len(reference), **shape)
    equal = int((np.cumprod(out == reference)).sum())
    return Line(
        f"{prefix}greedy",
        None,
        None,
        bool(equal == len(reference)) if exact else None,
        f"{equal} of {len(reference)} tokens equal",
    )


def _drafts(model: Model, golden: SafetensorsFile, exact: bool, shape: dict) -> Iterator[Line]:
    """The prediction layers behind the first prompt and its first greedy token."""
    prefix = "prompt_0.mtp."
    if "draft" not in model.params:
        yield Line(f"{prefix}logits", None, None, False, "the prediction layers were not loaded")
        return
    tokens = golden.read("prompt_0.input_ids")
    rows, expected = golden.read("mtp.rows"), golden.read(f"{prefix}draft_ids")
    ids = [*tokens[1:].tolist(), int(golden.read("prompt_0.greedy")[0])]
    predictor = Predictor(model, len(tokens) + len(expected))
    hidden = predictor.reads(model.forward(tokens, **shape))
    drafted: list[int] = []
    last: list[np.ndarray] = []
    for depth in range(len(expected)):
        if predictor.drafts.chained:
            following = ids if depth == 0 else drafted[-1:]
            start = 0 if depth == 0 else len(tokens) + depth - 1
            name = "logits" if depth == 0 else ""
        else:
            following, start, name = [*ids[depth:], *drafted], 0, f"logits_{depth}"
        tile = min(shape["tile"], len(following))
        logits, carry = predictor.feed(np.array(following, np.int32), hidden, start, depth, tile)
        if name:
            yield _compare(f"{prefix}{name}", logits[rows], golden.read(f"{prefix}{name}"), exact)
        if name and f"{prefix}carry" in golden.tensors:
            yield _compare(f"{prefix}carry", carry[rows], golden.read(f"{prefix}carry"), exact)
        if predictor.drafts.chained:
            hidden = carry[-1:]
        last.append(logits[-1])
        drafted.append(int(np.argmax(logits[-1])))
    yield _compare(f"{prefix}draft_logits", np.stack(last), golden.read(f"{prefix}draft_logits"), exact)
    equal = bool((np.array(drafted) == expected).all())
    yield Line(f"{prefix}draft_ids", None, None, equal if exact else None, f"{drafted} drafted")
