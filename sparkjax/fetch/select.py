"""Which files of a repository a box needs: the weights in one format, and the small files beside them."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

from .errors import FetchError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CONFIG = "config.json"
BESIDE = ("*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt", "LICENSE*")
"""Patterns of small files in the top folder: configs, tokenizers, templates, licences."""
INSIDE = ("additional_chat_templates/*.jinja",)


def small(names: Sequence[str]) -> list[str]:
    """The files beside the weights."""
    return [
        name
        for name in names
        if ("/" not in name and any(fnmatch.fnmatchcase(name, p) for p in BESIDE))
        or any(fnmatch.fnmatchcase(name, p) for p in INSIDE)
    ]


def weights(
    names: Sequence[str], weight_map: Mapping[str, str] | None, file: str | None
) -> list[str]:
    """The files that hold the weights.

    Args:
      names: of all files.
      weight_map: of the index, where there is one: tensor -> file.
      file: the one .gguf file that is asked for.

    Raises:
      FetchError: there are none, or one must be chosen.
    """
    if file is not None:
        if file not in names:
            raise FetchError(f"there is no file {file}; .gguf files: {_listed(ggufs(names))}")
        return [file]
    if weight_map is not None:
        found = sorted(set(weight_map.values()))
        missing = [name for name in found if name not in names]
        if missing:
            raise FetchError(f"{INDEX} names {missing[0]!r}, which the repository does not have")
        return found
    if SINGLE in names:
        return [SINGLE]
    found = ggufs(names)
    if len(found) == 1:
        return found
    if found:
        raise FetchError(f"name one of its .gguf files, as ORG/NAME/FILE: {_listed(found)}")
    raise FetchError(f"it has neither {INDEX}, {SINGLE} nor a .gguf file")


def ggufs(names: Sequence[str]) -> list[str]:
    return sorted(n for n in names if n.endswith(".gguf") and not n.startswith("mmproj"))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:20]) + (", ..." if len(names) > 20 else "") or "none"


def unread(config: Mapping[str, Any], weight_map: Mapping[str, str]) -> set[str]:
    """Files none of whose tensors this code reads (vision towers, say); nothing for an unknown
    family."""
    from ..model import ignored
    from ..models.config import UnsupportedConfig
    from ..models.registry import family_of

    try:
        family = family_of(dict(config))
        patterns = [f"{prefix}*" for prefix in ignored(family, family.read_config(dict(config)))]
    except UnsupportedConfig:
        return set()
    read = {
        file
        for tensor, file in weight_map.items()
        if not any(fnmatch.fnmatchcase(tensor, pattern) for pattern in patterns)
    }
    return set(weight_map.values()) - read
