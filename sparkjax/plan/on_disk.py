"""A checkpoint that lies on this machine, planned like a published one: only headers are read."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax

from ..manifests import Manifest
from ..model import ignored, loaded_tree
from ..models import params as declarations
from ..models import tables
from ..models.registry import family_of
from ..weights import load, stream
from ..weights.checkpoint import Checkpoint, open_checkpoint


@dataclasses.dataclass(frozen=True)
class OnDisk(Manifest):
    """What is known of a checkpoint without a manifest.

    Attributes:
      checkpoint: opened.
    """

    checkpoint: Checkpoint = dataclasses.field(kw_only=True)


def described(path: Path) -> OnDisk:
    """A checkpoint's directory or file.

    Raises:
      CheckpointError: it cannot be read.
    """
    checkpoint = open_checkpoint(path)
    return OnDisk(
        name=path.stem, product=path.name, repository=None, revision=None, format="as on disk",
        size_gb=None, tensors=None, unconfirmed=(), stored=(), config=checkpoint.config,
        checkpoint=checkpoint,
    )  # fmt: skip


def abstract_weights(checkpoint: Checkpoint, tree: declarations.Tree, ranks: int) -> Any:
    """What the loader makes of a checkpoint on GPUs, as `plan.weights.abstract_weights` has it.

    Raises:
      CheckpointError: tensors are missing, or not what the config asks for.
    """
    _check_names(checkpoint, ranks)
    specs = dict(declarations.leaves_of(declarations.specs(tree, ranks)))

    def whole(spec: Any, plane: stream.Planned) -> jax.ShapeDtypeStruct:
        """All ranks' planes, of which this is the first rank's."""
        names = (*spec, *(None,) * (len(plane.shape) - len(spec)))
        parts = [1 if name is None else ranks for name in names]
        shape = [n * part for n, part in zip(plane.shape, parts, strict=True)]
        return jax.ShapeDtypeStruct(tuple(shape), plane.dtype)

    return declarations.unflatten(
        {
            path: jax.tree.map(lambda plane, s=specs[path]: whole(s, plane), leaf.tree)
            for path, leaf in stream.plan(tree, checkpoint, ranks).items()
        }
    )


def _check_names(checkpoint: Checkpoint, ranks: int) -> None:
    """As `Model.load` does before it reads."""
    family = family_of(checkpoint.config)
    config = family.read_config(checkpoint.config)
    tree, partial = loaded_tree(family, config, ranks, checkpoint)
    hosted = tables.tensors(tables.declared(family, config), checkpoint)
    load.check_names(tree, checkpoint, (*ignored(family, config), *partial, *hosted))
