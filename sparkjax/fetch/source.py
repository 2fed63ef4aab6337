"""Which checkpoint is meant: `hf:ORG/NAME@REVISION`, `ORG/NAME`, or the name of a manifest."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from ..settings import HUB
from .errors import FetchError

MANIFESTS = Path(__file__).parents[2] / "checkpoints"
"""Manifests of published checkpoints, in a source tree."""
COMMIT = re.compile(r"[0-9a-f]{40}")
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._/-]*")


@dataclasses.dataclass(frozen=True)
class Source:
    """A checkpoint of a hub.

    Attributes:
      repository: ORG/NAME.
      revision: a commit, branch or tag; None is whatever the hub calls main.
      file: the one .gguf file that is meant, where the repository holds several.
    """

    repository: str
    revision: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        inner = f"/{self.file}" if self.file else ""
        return f"{HUB}{self.repository}{inner}" + (f"@{self.revision}" if self.revision else "")


def parse(text: str) -> Source:
    """The source that `hf:ORG/NAME[/FILE.gguf][@REVISION]` (with or without `hf:`) means.

    Raises:
      FetchError: it has another form.
    """
    path, at, revision = text.removeprefix(HUB).partition("@")
    parts = path.split("/")
    fine = len(parts) >= 2 and all(_PART.fullmatch(p) and ".." not in p for p in parts)
    fine &= not at or bool(_REVISION.fullmatch(revision) and ".." not in revision)
    file = "/".join(parts[2:]) or None
    if not fine or (file is not None and not file.endswith(".gguf")):
        raise FetchError(
            f"{text!r} is no checkpoint of the hub; allowed: ORG/NAME or ORG/NAME/FILE.gguf, "
            "with @REVISION behind it"
        )
    return Source("/".join(parts[:2]), revision or None, file)


def named(text: str, folder: Path = MANIFESTS) -> Source:
    """What `sparkjax pull NAME` means: a manifest where there is one of this name, else `parse`.

    Args:
      folder: of manifests.

    Raises:
      FetchError: neither, or a manifest that names no repository.
    """
    if "/" in text:
        return parse(text)
    from ..manifests import read_manifest

    name, _, revision = text.removeprefix(HUB).partition("@")
    path = folder / f"{name}.yaml"
    if not _PART.fullmatch(name) or not path.exists():
        known = ", ".join(sorted(p.stem for p in folder.glob("*.yaml"))) or "none here"
        raise FetchError(f"{text!r} is neither ORG/NAME nor a manifest; manifests: {known}")
    manifest = read_manifest(path)
    if manifest.repository is None:
        raise FetchError(
            f"the manifest {name} names no repository; give one: sparkjax pull ORG/NAME"
        )
    return Source(manifest.repository, revision or manifest.revision)
