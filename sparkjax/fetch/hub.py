"""A Hugging Face hub, or a box that speaks its language (`share`): what it has, and where."""

from __future__ import annotations

import re
from typing import Any

from .errors import FetchError
from .source import COMMIT, Source
from .store import File

PORT = 8765
"""Of a box that shares (`sparkjax pull --serve`)."""


class Hub:
    """One hub.

    Args:
      endpoint: its address; None is what huggingface_hub is configured to (HF_ENDPOINT).
      token: sent along; True takes the one that huggingface_hub is configured with, False none.
    """

    def __init__(self, endpoint: str | None = None, token: bool | str = True):
        import huggingface_hub

        self._hub = huggingface_hub
        chosen = None if token is True else token
        self._api = huggingface_hub.HfApi(endpoint=endpoint, token=chosen, library_name="sparkjax")
        self.endpoint = str(self._api.endpoint)

    @property
    def headers(self) -> dict[str, str]:
        """Of every request for a file: the credentials."""
        return dict(self._api._build_hf_headers())

    def files(self, source: Source) -> tuple[str, list[File]]:
        """(commit, its files) of a source.

        Raises:
          FetchError: there is none, it may not be read, or the hub cannot be reached.
        """
        try:
            info = self._api.model_info(
                source.repository, revision=source.revision, files_metadata=True, timeout=30
            )
        except Exception as error:
            raise FetchError(self._why(source, error)) from None
        if not COMMIT.fullmatch(info.sha or ""):
            raise FetchError(f"{self.endpoint} names no commit for {source}")
        return str(info.sha), [_file(s, source) for s in info.siblings or ()]

    def url(self, repository: str, commit: str, name: str) -> str:
        """Where the bytes of a file are."""
        return str(self._hub.hf_hub_url(repository, name, revision=commit, endpoint=self.endpoint))

    def _why(self, source: Source, error: Exception) -> str:
        from huggingface_hub import errors

        match error:
            case errors.GatedRepoError():
                return f"{source}: accept its terms on {self.endpoint}/{source.repository}, set HF_TOKEN"
            case errors.RepositoryNotFoundError():
                return (
                    f"{source}: {self.endpoint} has no such repository, or it is private (HF_TOKEN)"
                )
            case errors.RevisionNotFoundError():
                return f"{source}: there is no such revision"
            case errors.OfflineModeIsEnabled():
                return f"{source}: HF_HUB_OFFLINE is set; use --offline, or --from another box"
        words = (str(error) or type(error).__name__).splitlines()[0]
        return f"{source}: {self.endpoint} does not answer: {words}"


def _file(sibling: Any, source: Source) -> File:
    lfs = sibling.lfs
    digest = lfs.sha256 if lfs is not None else sibling.blob_id
    if sibling.size is None or digest is None:
        raise FetchError(f"{source}: the hub gives no size and hash of {sibling.rfilename!r}")
    kind = "sha256" if lfs is not None else "git-sha1"
    return File(name=sibling.rfilename, size=sibling.size, kind=kind, hash=digest)


def box(host: str) -> str:
    """The address of a box that shares: HOST, HOST:PORT or an http:// URL.

    Raises:
      FetchError: it has another form.
    """
    text = host.removeprefix("http://").rstrip("/")
    if not re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?", text):
        raise FetchError(f"{host!r} is no box; allowed: HOST or HOST:PORT")
    return f"http://{text}" if re.search(r":\d{1,5}$", text) else f"http://{text}:{PORT}"
