"""Parameters as an Orbax checkpoint: what `sparkjax export` writes and `Model.load` reads.

    DIRECTORY/config.json, tokenizer files    as of the checkpoint that was exported
    DIRECTORY/params.json                     which parameters are quantized, and how
    DIRECTORY/params/                         an Orbax PyTree: nested dicts of arrays

The tree is that of `Model.params` for one rank: stacked over layers and experts, unpadded. A
quantized parameter is a dict of its planes; params.json has its format and static fields. Nothing
in either file is ever unpickled.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..models import params as declarations
from . import formats
from .checkpoint import read_json
from .detect import Stored
from .errors import CheckpointError
from .formats.base import QuantizedTensor
from .formats.mixed import Mixed

PARAMS = "params"
FACTS = "params.json"
LAYOUT = 1
CHUNK = 64 << 20
"""Bytes of a piece of an array on disk: what a reader of a part must read."""


def orbax() -> Any:
    """The library.

    Raises:
      CheckpointError: it is not installed.
    """
    try:
        import orbax.checkpoint
    except ImportError:
        raise CheckpointError(
            "Orbax checkpoints need a further package: pip install 'sparkjax[orbax]'"
        ) from None
    return orbax.checkpoint


# --- Nodes as dicts ------------------------------------------------------------------------------


def _classes() -> dict[str, type]:
    """Formats by name."""
    from . import detect  # noqa: F401  (all formats)

    found: dict[str, type] = {}
    rest: list[type] = [QuantizedTensor]
    while rest:
        kind = rest.pop()
        found[kind.__name__] = kind
        rest += kind.__subclasses__()
    return found


def _fields(kind: type) -> tuple[list[str], list[str]]:
    """(planes, static fields) of a format."""
    fields = dataclasses.fields(kind)
    planes = [f.name for f in fields if f.metadata.get("pytree_node", True)]
    return planes, [f.name for f in fields if f.name not in planes]


def taken_apart(value: Any) -> tuple[Any, Any]:
    """(nested dicts of arrays, what to build it again from) of an array, a node, a tuple of those,
    or None."""
    if isinstance(value, tuple):
        each = [taken_apart(v) for v in value]
        return {str(i): tree for i, (tree, _) in enumerate(each)}, {"tuple": [f for _, f in each]}
    if not formats.is_quantized(value):
        return value, None if value is None else "array"
    planes, static = _fields(type(value))
    parts = {name: taken_apart(getattr(value, name)) for name in planes}
    facts = {
        "format": type(value).__name__,
        "static": {name: getattr(value, name) for name in static},
        "planes": {name: fact for name, (_, fact) in parts.items()},
    }
    return {name: tree for name, (tree, _) in parts.items() if tree is not None}, facts


def put_together(tree: Any, facts: Any) -> Any:
    """The opposite of `taken_apart`.

    Raises:
      CheckpointError: the two do not fit, or an unknown format.
    """
    if facts is None:
        return None
    if facts == "array":
        if not hasattr(tree, "shape"):
            raise CheckpointError(f"{FACTS} expects an array where the checkpoint has {type(tree)}")
        return tree
    try:
        if "tuple" in facts:
            return tuple(put_together(tree[str(i)], f) for i, f in enumerate(facts["tuple"]))
        kind = _classes().get(facts["format"])
        if kind is None:
            raise CheckpointError(
                f"{FACTS}: format is {facts['format']!r}, which is not known here"
            )
        planes = {n: put_together(tree.get(n), f) for n, f in facts["planes"].items()}
        static = {name: _frozen(value) for name, value in facts["static"].items()}
        return kind(**planes, **static)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{FACTS} does not fit the checkpoint: {error!r}") from None


def _frozen(value: Any) -> Any:
    return tuple(_frozen(v) for v in value) if isinstance(value, list) else value


def member(value: Any, lead: tuple[int, ...]) -> Any:
    """One layer's (one expert's) part of a stacked host parameter."""
    if not isinstance(value, Mixed):
        return value.at(lead) if formats.is_quantized(value) and lead else value[lead]
    number = int(np.ravel_multi_index(lead, value.lead))
    stack = value.stacks[value.kinds[number]]
    at = (value.slots[number], *(0,) * (len(value.lead) - 1))
    return stack.at(at) if formats.is_quantized(stack) else stack[at]


# --- Writing -------------------------------------------------------------------------------------


def write(path: Path, params: Any, config: Mapping[str, Any]) -> None:
    """Writes a directory whose parameters are these; it must not exist yet.

    Args:
      params: host arrays and nodes in nested dicts, as for one rank.
      config: the keys of config.json.

    Raises:
      CheckpointError: Orbax is missing, or the directory is there already.
    """
    library = orbax()
    if path.exists():
        raise CheckpointError(f"{path} exists already")
    leaves = declarations.leaves_of(params)
    apart = {name: taken_apart(leaf) for name, leaf in leaves}
    tree = declarations.unflatten({name: t for name, (t, _) in apart.items()})
    new = path.with_name(f"{path.name}.part")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    facts = {"layout": LAYOUT, "params": {name: fact for name, (_, fact) in apart.items()}}
    (new / FACTS).write_text(json.dumps(facts, indent=1) + "\n")
    (new / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    import jax

    save = jax.tree.map(lambda a: library.SaveArgs(chunk_byte_size=CHUNK), tree)
    on_cpu = jax.local_devices(backend="cpu")[0]
    with library.PyTreeCheckpointer() as checkpointer:
        arrays = jax.tree.map(lambda a: jax.device_put(a, on_cpu), tree)
        checkpointer.save((new / PARAMS).absolute(), arrays, save_args=save)
    new.rename(path)


# --- Reading -------------------------------------------------------------------------------------


class Exported:
    """Such a directory as a `weights.checkpoint.Checkpoint`: stacked parameters under the names
    that their members have in a Hugging Face checkpoint."""

    def __init__(self, path: Path):
        self.path = path
        self.config = read_json(path / "config.json")
        self._facts = self._read_facts()
        self._tree: Any = None
        self._where = self._names()
        self.names = frozenset(self._where)
        self.quantized: Mapping[str, Stored] = {}
        self.unread: frozenset[str] = frozenset()
        self.files: list[tuple[Path, np.ndarray]] = []

    def _read_facts(self) -> dict[str, Any]:
        facts = read_json(self.path / FACTS)
        params = facts.get("params")
        if facts.get("layout") != LAYOUT or not isinstance(params, dict):
            raise CheckpointError(
                f"{self.path / FACTS}: layout is {facts.get('layout')!r}; allowed: {LAYOUT}"
            )
        return params

    def _names(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name -> (parameter, place in it), from the family's declarations."""
        from ..models.registry import family_of

        family = family_of(self.config)
        config = family.read_config(self.config)
        tree = dict(family.declare(config, 1))
        if any(name.startswith("draft.") for name in self._facts):
            tree["draft"] = family.declare_draft(config, 1)
        found = {}
        for name, param in declarations.leaves(tree):
            if name in self._facts:
                for lead, fill in param.places():
                    found[param.name.format(**fill)] = (name, lead)
        unknown = set(self._facts) - {name for name, _ in found.values()}
        if unknown:
            raise CheckpointError(f"{self.path}: unexpected parameter {min(unknown)}")
        return found

    def _restored(self) -> dict[str, Any]:
        """Host arrays and nodes by dotted path; read when first asked for."""
        if self._tree is None:
            library = orbax()
            import jax

            folder = (self.path / PARAMS).absolute()
            with library.PyTreeCheckpointer() as checkpointer:
                try:
                    meta = checkpointer.metadata(folder)
                    meta = getattr(meta, "item_metadata", meta)
                    meta = getattr(meta, "tree", meta)
                    numbers = jax.tree.map(
                        lambda _: library.RestoreArgs(restore_type=np.ndarray), meta
                    )
                    tree = checkpointer.restore(folder, restore_args=numbers)
                except (ValueError, OSError, KeyError, TypeError) as error:
                    raise CheckpointError(f"{folder}: cannot be read: {error}") from None
            self._tree = {}
            for name, facts in self._facts.items():
                self._tree[name] = put_together(_at(tree, name, self.path), facts)
        return self._tree

    def weight(self, name: str, *, check: bool = True) -> Any:
        """See `Checkpoint`."""
        param, lead = self._where[name]
        return member(self._restored()[param], lead)

    def read(self, name: str) -> np.ndarray:
        """See `Checkpoint`."""
        return np.asarray(self.weight(name))

    def kind(self, name: str) -> str | None:
        """See `Checkpoint`."""
        return None


def _at(tree: Any, name: str, path: Path) -> Any:
    for part in name.split("."):
        if not isinstance(tree, dict) or part not in tree:
            raise CheckpointError(f"{path}: missing parameter {name}")
        tree = tree[part]
    return tree
