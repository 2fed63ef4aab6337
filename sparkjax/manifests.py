"""Manifests of published checkpoints: what they are, and what follows from declarations alone.

A manifest (`checkpoints/*.yaml`) names a repository, its format and the values of its config.json.
The expected tensors and the bytes of every rank are derived from the family's declarations at real
size; nothing is allocated and no weight is needed.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from .models import params as declarations
from .models.registry import family_of
from .weights.published import written


@dataclasses.dataclass(frozen=True)
class Manifest:
    """One published checkpoint.

    Attributes:
      name: the file's name without its ending.
      product: what people call the model.
      repository, revision: on the hub; None where not known.
      format: how its weights are stored, in words.
      size_gb, tensors: as published (1e9 bytes; number of tensors in all files), None if unknown.
      unconfirmed: what of this page nobody has confirmed.
      stored: (pattern, layout) rules for quantized weights: the first pattern that matches a whole
        name gives its layout (`weights.published`); what none matches lies there as declared.
      config: the values of config.json; a manifest may name another one with the same values.
      apart: by which `tensors` differs from `published_tensors`, in words -> how many: what the
        files hold beyond that (a vision tower), or, negative, what is counted too often.
    """

    name: str
    product: str
    repository: str | None
    revision: str | None
    format: str
    size_gb: float | None
    tensors: int | None
    unconfirmed: tuple[str, ...]
    stored: tuple[tuple[str, str], ...]
    config: dict[str, Any]
    apart: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def family(self) -> Any:
        return family_of(self.config)

    def declare(self, ranks: int = 1, draft: bool = True) -> declarations.Tree:
        """The declarations of all parameters, with the family's own prediction layers."""
        family, config = self.family, self.family.read_config(self.config)
        tree = family.declare(config, ranks)
        if draft and hasattr(family, "declare_draft"):
            tree = {**tree, "draft": family.declare_draft(config, ranks)}
        return tree

    def layout(self, name: str) -> str | None:
        """The layout of the weight `name`; None where it is not quantized."""
        for pattern, layout in self.stored:
            if re.fullmatch(pattern, name):
                return layout
        return None

    def published_tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, shape) of every tensor of the files that the family reads, quantization's own
        included."""
        for name, shape in self.expected_tensors():
            layout = self.layout(name)
            if layout is None:
                yield name, shape
            else:
                for part, (_, size) in written(layout, name, *shape).items():
                    yield part, size

    def expected_tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, shape) of every unquantized tensor, under the checkpoint's names."""
        for _, param in declarations.leaves(self.declare()):
            for _, fill in param.places():
                yield param.name.format(**fill), tuple(dim.size for dim in param.dims)

    def bytes_per_rank(self, ranks: int, dtype: str = "bfloat16") -> int:
        """Bytes of one rank's unquantized parameters, padding included."""
        total = 0
        for _, param in declarations.leaves(self.declare(ranks)):
            shards = ranks if any(dim.units is not None for dim in param.dims) else 1
            total += declarations.nbytes({"one": param}, dtype) // shards
        return total


def read_manifest(path: Path) -> Manifest:
    """Reads one manifest file.

    Raises:
      ValueError: a field is missing or unknown, or `config` names no manifest; names the file and
        the field.
    """
    values = yaml.safe_load(path.read_text())
    known = {field.name for field in dataclasses.fields(Manifest)} - {"name"}
    optional = {"files", "tp_size", "apart"}
    missing, unknown = known - set(values) - optional, set(values) - known - optional
    if missing or unknown:
        wrong = ", ".join(sorted(missing or unknown))
        raise ValueError(f"{path}: {'missing' if missing else 'unknown'} fields: {wrong}")
    kept = {key: value for key, value in values.items() if key in known}
    if isinstance(kept["config"], str):
        other = path.with_name(f"{kept['config']}.yaml")
        if not other.is_file():
            raise ValueError(f"{path}: config: there is no manifest {kept['config']!r} beside it")
        kept["config"] = read_manifest(other).config
    kept["unconfirmed"] = tuple(kept["unconfirmed"] or ())
    kept["stored"] = tuple((kept["stored"] or {}).items())
    if not all(type(n) is int for n in (kept.get("apart") or {}).values()):
        raise ValueError(f"{path}: apart: allowed: words -> a number of tensors")
    return Manifest(name=path.stem, **kept)


def read_manifests(folder: Path) -> list[Manifest]:
    """All manifests of a folder, by name."""
    return [read_manifest(path) for path in sorted(folder.glob("*.yaml"))]
