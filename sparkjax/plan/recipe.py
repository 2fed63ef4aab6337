"""From a recipe (a configuration) to the manifest and the limits that its ranks would run with."""

from __future__ import annotations

from pathlib import Path

from ..config import Config, ConfigError, locate
from ..engine.limits import CONTEXT
from ..engine.records import Limits
from ..fetch.errors import FetchError
from ..fetch.source import MANIFESTS, parse
from ..manifests import Manifest, read_manifest, read_manifests
from ..models import cache as caches
from ..settings import HUB, Engine
from .on_disk import described

TILES = (64, 512, 2048)
"""Prefill tiles of a GB10 where a recipe names none."""


class PlanError(ValueError):
    """What was asked for cannot be planned; the message says what to change."""


def manifest_named(name: str, folder: Path = MANIFESTS) -> Manifest:
    """The manifest `checkpoints/NAME.yaml`.

    Raises:
      PlanError: there is none; names those there are.
    """
    path = folder / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in folder.glob("*.yaml")))
        raise PlanError(f"there is no manifest {name!r}; manifests: {known}")
    return read_manifest(path)


def manifest_of(config: Config, folder: Path = MANIFESTS) -> Manifest:
    """The manifest of a recipe's model: `model.manifest`, or the one of model.path's repository, or
    what is found at model.path on this machine.

    Raises:
      PlanError: the recipe names no published checkpoint, and there is none on this machine.
      CheckpointError: the one that is here cannot be read.
    """
    if config.model.manifest is not None:
        return manifest_named(config.model.manifest, folder)
    path = config.model.path or ""
    if path.startswith(HUB):
        try:
            repository = parse(path).repository
        except FetchError as error:
            raise PlanError(f"model.path: {error}") from None
        for manifest in read_manifests(folder):
            if manifest.repository == repository:
                return manifest
    try:
        return described(locate(path))
    except ConfigError:
        raise PlanError(
            f"model.path is {config.model.path!r}: no manifest describes it, and it is not on this "
            "machine; set model.manifest to the name of one, or plan with --model NAME"
        ) from None


def limits_of(
    engine: Engine, manifest: Manifest, ranks: int, kv_tokens: int | None = None
) -> Limits:
    """The limits that a recipe's settings give on a GB10.

    Args:
      kv_tokens: overrides `engine.kv_tokens`.

    Raises:
      PlanError: a context beyond the model's.
    """
    family = manifest.family
    config = family.read_config(manifest.config)
    page = engine.page_size or caches.page_size(family.declare_caches(config, ranks))
    context = engine.context or min(config.max_positions, CONTEXT)
    if context > config.max_positions:
        raise PlanError(
            f"engine.context is {context}; the model's own limit is {config.max_positions} tokens"
        )
    tokens = kv_tokens or engine.kv_tokens or engine.slots * context
    tiles = engine.tiles or TILES
    rows = engine.rows or (max(engine.slots, 2),)
    return Limits(
        slots=engine.slots,
        pages=max(-(-tokens // page), 1),
        page_size=page,
        context=context,
        queue=engine.queue,
        tiles=tuple(tiles),
        rows=tuple(rows),
        busy_tiles=engine.busy_tiles,
        idle_tiles=engine.idle_tiles,
        admission=engine.admission,
        window=engine.window,
    )
