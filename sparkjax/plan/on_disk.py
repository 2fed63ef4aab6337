"""A checkpoint that lies on this machine, planned like a published one: only headers are read."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax

from ..manifests import Manifest
from ..mesh import spmd
from ..model import loaded_tree
from ..models import params as declarations
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
    family = family_of(checkpoint.config)
    config = family.read_config(checkpoint.config)
    loaded, unread = loaded_tree(family, config, ranks, checkpoint)
    load.check_names(loaded, checkpoint, unread)
    specs = dict(declarations.leaves_of(declarations.specs(tree, ranks)))

    def whole(spec: Any, plane: stream.Planned) -> jax.ShapeDtypeStruct:
        """All ranks' planes, of which this is the first rank's."""
        return jax.ShapeDtypeStruct(spmd.whole(spec, plane.shape, ranks), plane.dtype)

    return declarations.unflatten(
        {
            path: jax.tree.map(lambda plane, s=specs[path]: whole(s, plane), leaf.tree)
            for path, leaf in stream.plan(tree, checkpoint, ranks).items()
        }
    )
