"""`sparkjax export`: a model's parameters as an Orbax checkpoint, for flax, optax and back."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .fetch.select import CONFIG, INDEX, small
from .models import params as declarations
from .models import tables
from .models.registry import family_of
from .weights import exported, formats, load
from .weights.checkpoint import MODELOPT, Directory, open_checkpoint
from .weights.errors import CheckpointError

log = logging.getLogger(__name__)
QUANTIZATION = ("quantization_config", "compression_config", "quantization")
NUMBERS = ("float32", "bfloat16")


def export(
    source: str | Path,
    target: str | Path,
    dtype: str | None = None,
    progress: load.Progress | None = None,
) -> Path:
    """Writes a checkpoint's parameters as a sharded Orbax checkpoint that `Model.load` serves.

    The tree under TARGET/params is that of `Model.params` (nested dicts, stacked over layers and
    experts), so it can be restored with Orbax alone, trained with optax, and saved in its place.

    Args:
      source: a checkpoint directory or a .gguf file.
      target: a new directory.
      dtype: "float32" or "bfloat16": of dequantized weights; None keeps every weight as it is.

    Raises:
      CheckpointError: the source cannot be read or exported, the target exists, or Orbax is missing.
    """
    if dtype not in (None, *NUMBERS):
        raise CheckpointError(f"dtype is {dtype!r}; allowed: {', '.join(NUMBERS)}, or none")
    exported.orbax()
    source, target = Path(source), Path(target).absolute()
    checkpoint = open_checkpoint(source)
    family = family_of(checkpoint.config)
    config = family.read_config(checkpoint.config)
    if any(isinstance(t, tables.Table) for t in tables.declared(family, config).values()):
        raise CheckpointError(
            f"{source}: a model with lookup tables of its own beside the parameters is not exported"
        )
    from .model import loaded_tree

    tree, unread = loaded_tree(family, config, 1, checkpoint)
    params = load.load_params(tree, checkpoint, ignored=unread, progress=progress)
    params = jax.tree.map(np.asarray, params)
    if dtype is not None:
        params = numbers(tree, params, dtype)
    values = {k: v for k, v in checkpoint.config.items() if k not in QUANTIZATION}
    exported.write(target, params, values)
    beside = source if isinstance(checkpoint, Directory) else None
    if beside is not None:
        names = small([p.name for p in beside.iterdir() if p.is_file()])
        for name in names:
            if name not in (CONFIG, INDEX, MODELOPT):
                shutil.copy(beside / name, target / name)
    else:
        log.warning("%s: a tokenizer inside a .gguf file is not exported", source)
    return target


def numbers(tree: declarations.Tree, params: Any, dtype: str) -> Any:
    """All parameters as plain arrays: weights in `dtype`, the others as they are declared."""
    declared = dict(declarations.leaves(tree))
    dequantize = jax.jit(formats.dequantize, static_argnames="dtype")

    def one(name: str, leaf: Any) -> np.ndarray:
        wanted = declarations.dtype_of(declared[name], dtype)
        if formats.is_quantized(leaf):
            return np.asarray(dequantize(jax.tree.map(jnp.asarray, leaf), dtype=wanted))
        return leaf.astype(wanted)

    leaves = declarations.leaves_of(params)
    return declarations.unflatten({name: one(name, leaf) for name, leaf in leaves})
