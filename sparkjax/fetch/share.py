"""Pulled checkpoints for other boxes: the two routes of a hub that `pull` needs.

    GET /api/models/ORG/NAME[/revision/REVISION]    the commit and its files, with sizes and hashes
    GET /ORG/NAME/resolve/COMMIT/FILE               the bytes; ranges are answered

Only finished checkpoints are offered, and only the files that their records list: a path is looked
up, never built from what a client sends. Any client of the hub can read from here (HF_ENDPOINT).
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from .errors import FetchError
from .source import Source
from .store import File, Record, Store, is_verified, read_record

Handler = Callable[[Request], Awaitable[Response]]


def app(store: Store, keys: tuple[str, ...] = ()) -> Starlette:
    """The server.

    Args:
      keys: one of these must come as `Authorization: Bearer KEY`; () asks for none.
    """

    def found(repository: str, revision: str | None) -> tuple[Path, Record] | None:
        try:
            folder = store.find(Source(repository, revision))
            record = read_record(folder)
        except (FetchError, OSError):
            return None
        # A box that has only a share of the files does not pass it on as the whole.
        part = record is None or record.left_out or record.share is not None
        return None if record is None or part else (folder, record)

    def allowed(request: Request) -> bool:
        given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
        matches = [hmac.compare_digest(given, key.encode()) for key in keys]
        return not keys or any(matches)

    async def info(request: Request) -> Response:
        if not allowed(request):
            return _refuse(401, "a key is needed", "GatedRepo")
        repository = _repository(request)
        here = found(repository, request.path_params.get("revision"))
        if here is None:
            return _refuse(404, f"{repository} is not here, or not whole", "RepoNotFound")
        _, record = here
        body = {
            "id": repository,
            "modelId": repository,
            "sha": record.commit,
            "siblings": [_sibling(file) for file in record.files],
        }
        return JSONResponse(body)

    async def resolve(request: Request) -> Response:
        if not allowed(request):
            return _refuse(401, "a key is needed", "GatedRepo")
        here = found(_repository(request), request.path_params["revision"])
        if here is None:
            return _refuse(404, "no such checkpoint", "RepoNotFound")
        folder, record = here
        wanted = request.path_params["name"]
        file = next((f for f in record.files if f.name == wanted), None)
        if file is None or not is_verified(folder, record, file):
            return _refuse(404, "no such file", "EntryNotFound")
        headers = {
            "etag": f'"{file.hash}"',
            "x-linked-etag": f'"{file.hash}"',
            "x-linked-size": str(file.size),
            "x-repo-commit": record.commit,
        }
        return FileResponse(
            folder / file.name, headers=headers, media_type="application/octet-stream"
        )

    made = Starlette(
        routes=[
            Route("/api/models/{org}/{name}", info),
            Route("/api/models/{org}/{name}/revision/{revision:path}", info),
            Route("/{org}/{repo}/resolve/{revision}/{name:path}", resolve),
        ]
    )
    made.router.redirect_slashes = False
    return made


def _repository(request: Request) -> str:
    at = request.path_params
    return f"{at['org']}/{at['repo'] if 'repo' in at else at['name']}"


def _sibling(file: File) -> dict[str, Any]:
    sibling: dict[str, Any] = {"rfilename": file.name, "size": file.size}
    if file.kind == "sha256":
        return sibling | {
            "blobId": file.hash[:40],
            "lfs": {"sha256": file.hash, "size": file.size, "pointerSize": 0},
        }
    return sibling | {"blobId": file.hash}


def _refuse(status: int, words: str, code: str) -> Response:
    headers = {"x-error-code": code, "x-error-message": words}
    return JSONResponse({"error": words}, status, headers)


def serve(store: Store, host: str, port: int, keys: tuple[str, ...] = ()) -> None:
    """Shares until it is stopped."""
    import uvicorn

    uvicorn.run(app(store, keys), host=host, port=port, log_level="info")
